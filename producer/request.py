"""Requests as producers check and send them: what is wrong is found here, before the queue, and told in one line."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from tokenmill.shared import calls
from tokenmill.shared.async_broker import AsyncBroker
from tokenmill.shared.broker import Broker, Enqueued
from tokenmill.shared.calls import EnqueueOptions
from tokenmill.shared.errors import BrokerFullError, TokenmillError, UsageError
from tokenmill.shared.protocol import StrictRequest
from tokenmill.shared.settings import DEFAULTS

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]

_BYTES_PER_TOKEN = 4  # of text, roughly: producers have no tokenizer
_BROKER_FULL_RETRY_S = 1.0  # a broker at maxmemory does not say when it will have room


class IdInUseError(UsageError):
    """The id, or the idempotency key, belongs to another request, or to one whose reply is gone."""


class QueueFullError(TokenmillError):
    """The queue, or its whole broker, takes no more for now; ``retry_after`` says in how many seconds to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def check_request(fields: Mapping[str, Any]) -> StrictRequest:
    """The request that the fields of one JSON object make; raises UsageError."""
    try:
        request = msgspec.convert(fields, StrictRequest)
    except msgspec.ValidationError as error:
        raise UsageError(explain(error)) from None
    size = len(encode(request))
    if size > DEFAULTS.max_payload_bytes:
        raise UsageError(f"the request has {size:,} bytes; the limit is {DEFAULTS.max_payload_bytes:,}")
    return request


def make_request(
    prompt: Prompt | None = None,
    messages: Messages | None = None,
    *,
    id: str | None = None,  # noqa: A002 (the name it has on the wire)
    **params: Any,
) -> StrictRequest:
    """The request that a call describes, with an id of its own where none is given; raises UsageError."""
    fields = {"id": id or uuid.uuid4().hex, **params}
    if prompt is not None:
        fields["prompt"] = prompt
    if messages is not None:
        fields["messages"] = messages
    return check_request(fields)


def encode(request: StrictRequest) -> bytes:
    """The request as it travels. Who is told of its ending is left out: from another client it is the same request."""
    if request.reply_to is not None:
        request = msgspec.structs.replace(request, reply_to=None)
    return msgspec.json.encode(request)


def send(broker: Broker, request: StrictRequest) -> str:
    """Put the request on the queue, once however often it is sent; returns the id whose reply answers it.

    That is its own id, but under a known idempotency key the first request's. Raises IdInUseError and QueueFullError.
    """
    with _refusals():
        answer = broker.enqueue(request.id, encode(request), **_options(request))
    if _was_answered(request, answer) and broker.read_replies([answer.id]) == [None]:
        raise _gone(answer.id)
    return answer.id


async def send_async(broker: AsyncBroker, request: StrictRequest) -> str:
    """The same on an event loop."""
    with _refusals():
        answer = await broker.call(calls.enqueue(broker.keys, request.id, encode(request), _options(request)))
    if _was_answered(request, answer) and await broker.call(calls.reply(broker.keys, answer.id)) is None:
        raise _gone(answer.id)
    return answer.id


def _options(request: StrictRequest) -> EnqueueOptions:
    return {
        "stream": request.stream,
        "priority": request.priority,
        "timeout_ms": request.timeout_ms,
        "cost": cost(request),
        "reply_to": request.reply_to,
        "idempotency_key": request.idempotency_key,
    }


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except BrokerFullError as error:
        raise QueueFullError(f"{error}; try again in {_BROKER_FULL_RETRY_S:g} s", _BROKER_FULL_RETRY_S) from error


def _was_answered(request: StrictRequest, answer: Enqueued) -> bool:
    """Whether an earlier request, which has ended, is this one; raises what hinders it to be one."""
    if answer.status == "full":
        retry_after = answer.retry_after_ms / 1000
        raise QueueFullError(
            f"the queue is full ({answer.depth} requests and {answer.queued_tokens} tokens are waiting): "
            f"try again in {retry_after:g} s",
            retry_after,
        )
    if answer.status == "conflict" and answer.id != request.id:
        raise IdInUseError(f"idempotency_key: another request was sent under `{request.idempotency_key}`")
    if answer.status == "conflict":
        raise IdInUseError(f"id: another request has the id `{request.id}` already; choose another one")
    return answer.status == "duplicate" and answer.state not in ("waiting", "running")


def _gone(request_id: str) -> IdInUseError:
    return IdInUseError(f"id: request `{request_id}` was answered before and its reply is gone; choose another id")


def cost(request: StrictRequest) -> int:
    """Tokens that a request may take, prompt and output, guessed where only a tokenizer would know."""
    if isinstance(request.messages, list):
        prompt = sum(len(message.content.encode()) for message in request.messages) // _BYTES_PER_TOKEN
    elif isinstance(request.prompt, str):
        prompt = len(request.prompt.encode()) // _BYTES_PER_TOKEN
    else:
        prompt = len(request.prompt) if isinstance(request.prompt, list) else 0
    return prompt + request.max_tokens


def explain(error: Exception) -> str:
    """One line for a decoding error, the field first: ``max_tokens: expected `int` >= 1``."""
    what, _, where = str(error).partition(" - at `$")
    what = what.removeprefix("Object contains ")
    field = where.removesuffix("`").removeprefix(".")
    return f"{field}: {what[0].lower()}{what[1:]}" if field else what[0].lower() + what[1:]
