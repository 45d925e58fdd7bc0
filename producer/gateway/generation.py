"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from litestar import Response, get, post
from litestar.params import Parameter
from litestar.response import Stream

from tokenmill.producer.gateway.chat import ChatBody, ChatCompletion
from tokenmill.producer.gateway.completions import Completion, CompletionBody
from tokenmill.producer.gateway.desk import Call, Desk, with_key
from tokenmill.producer.gateway.dialect import Body, Dialect, answer_of, requests_of, supported, usage_of
from tokenmill.producer.gateway.errors import as_api_error, failure
from tokenmill.producer.gateway.openai import CHAT, COMPLETIONS
from tokenmill.producer.gateway.specification import ERRORS
from tokenmill.shared.protocol import Reply, StrictRequest

IdempotencyKey = Annotated[
    str | None,
    Parameter(
        header="Idempotency-Key",
        max_length=256,
        description="The same body under the same key is generated once, for a day; another body is refused (409).",
    ),
]


class Model(msgspec.Struct, kw_only=True):
    """A model that workers run now."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "tokenmill"


class Models(msgspec.Struct, kw_only=True):
    """The models of the workers that are alive."""

    data: list[Model]
    object: str = "list"


@get("/v1/models", responses=ERRORS, tags=["OpenAI"])
async def list_models(desk: Desk) -> Models:
    """List the models that workers run now."""
    return Models(data=[Model(id=name) for name in await desk.crew.models()])


@get("/v1/models/{model:str}", responses=ERRORS, tags=["OpenAI"])
async def show_model(desk: Desk, model: str) -> Model:
    """Show one model."""
    await desk.crew.check(model)
    return Model(id=model)


@post("/v1/completions", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def complete(
    request: Call, desk: Desk, data: CompletionBody, idempotency_key: IdempotencyKey = None
) -> Response[Completion]:
    """Complete a prompt, or several; as server-sent events with `stream`."""
    return await _generate(request, desk, COMPLETIONS, data, idempotency_key)


@post("/v1/chat/completions", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def chat(
    request: Call, desk: Desk, data: ChatBody, idempotency_key: IdempotencyKey = None
) -> Response[ChatCompletion]:
    """Answer a chat; as server-sent events with `stream`."""
    return await _generate(request, desk, CHAT, data, idempotency_key)


async def _generate(call: Call, desk: Desk, dialect: Dialect[Any], body: Body, key: str | None) -> Response[Any]:
    """The answer, or the stream that brings it."""
    supported(body)
    requests = requests_of(dialect, body, call.user.own(uuid.uuid4().hex))
    await desk.crew.check(body.model)
    desk.quotas.take(call.user, len(requests))
    try:
        ids = await desk.send(with_key(requests, call.user, key))
    except BaseException:
        desk.quotas.give_back(call.user, len(requests))
        raise
    answer = _Answer(call, desk, dialect, body, requests, ids, kept=key is not None)
    if not body.stream:
        return Response(await answer.whole(), headers={"openai-processing-ms": str(round(answer.processing_ms))})
    await answer.begin()
    events = answer.events()
    weakref.finalize(events, answer.leave)  # of a caller who went away before the first event nothing else would tell
    return Stream(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class _Answer:
    """One call whose requests are on the queue; without an idempotency key they end with it."""

    def __init__(
        self,
        call: Call,
        desk: Desk,
        dialect: Dialect[Any],
        body: Body,
        requests: Sequence[StrictRequest],
        ids: list[str],
        *,
        kept: bool,
    ) -> None:
        self._call, self._desk, self._dialect, self._body = call, desk, dialect, body
        self._requests, self._ids, self._kept = requests, ids, kept
        self._unanswered = set(ids)
        self.processing_ms = 0.0
        """From enqueue to the last reply."""
        self._created = int(time.time())
        self._pieces: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._left = False

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        try:
            replies = await self._desk.while_there(self._call, self._desk.replies(self._ids, self._requests))
            self._unanswered.clear()
            self.processing_ms = max(reply.e2e_ms or 0.0 for reply in replies)
            return answer_of(self._dialect, self._body, replies, answer_id=self._ids[0], created=self._created)
        finally:
            self.leave()

    async def begin(self) -> None:
        """Wait for the first piece of a stream, so that an error before it has a status of its own."""
        self._readers = [asyncio.create_task(self._read(i)) for i in range(len(self._ids))]
        try:
            self._first = await self._desk.while_there(self._call, self._pieces.get())
            if isinstance(self._first, Exception):
                raise self._first
        except BaseException:
            self.leave()
            raise

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it is made; an error that comes after the beginning is the last event."""
        try:
            begun: set[int] = set()
            replies: list[Reply | None] = [None] * len(self._ids)
            piece = self._first
            while not isinstance(piece, Exception):
                index = piece["index"]
                if index not in begun and (first := self._dialect.first(index)) is not None:
                    yield self._chunk([first])
                begun.add(index)
                replies[index] = piece.pop("reply", None)
                yield self._chunk([piece])
                if None not in replies:
                    break
                piece = await self._pieces.get()
            else:
                yield _event(as_api_error(piece).body())
                return
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                usage = usage_of(self._body, [reply for reply in replies if reply is not None])
                yield self._chunk([], usage=msgspec.to_builtins(usage))
            yield b"data: [DONE]\n\n"
        finally:
            self.leave()

    async def _read(self, index: int) -> None:
        """Put the pieces of one choice into the queue."""
        request_id, dialect = self._ids[index], self._dialect
        try:
            if self._requests[index].stream:
                async with self._desk.client.read(request_id, timeout=self._desk.timeout_s) as stream:
                    async for text in stream:
                        self._pieces.put_nowait(dialect.piece(index, text))
                    reply = stream.reply
            else:
                reply = await self._desk.client.wait(request_id, self._desk.timeout_s)
            self._unanswered.discard(request_id)
            if (problem := failure(reply)) is not None:
                raise problem
            self._pieces.put_nowait({**dialect.last(self._body, index, reply), "reply": reply})
        except Exception as error:
            self._pieces.put_nowait(error)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": f"{self._dialect.prefix}{self._ids[0]}", "object": self._dialect.chunk_object}
        return _event({**head, "created": self._created, "model": self._body.model, "choices": choices, **more})

    def leave(self) -> None:
        """Wait no longer; what is not answered is cancelled. A second time it does nothing."""
        if self._left:
            return
        self._left = True
        for reader in self._readers:
            reader.cancel()
        self._desk.quotas.give_back(self._call.user, len(self._ids))
        if not self._kept:
            self._desk.cancel_later(list(self._unanswered))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
