"""The client for event loops: thousands of requests wait, or stream, over a few connections."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

import msgspec

from tokenmill.producer.client import NoReplyError, ReplyGoneError, WhenFull
from tokenmill.producer.feed import REORDER, WINDOW, as_request, refusal
from tokenmill.producer.inbox import Inbox, Waiter
from tokenmill.producer.outage import Outage
from tokenmill.producer.request import IdInUseError, Messages, Prompt, QueueFullError, make_request, send_async
from tokenmill.shared import calls
from tokenmill.shared.async_broker import AsyncBroker
from tokenmill.shared.connection import connect_async
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError
from tokenmill.shared.protocol import Reply, StrictRequest
from tokenmill.shared.records import TokenEntry
from tokenmill.shared.settings import DEFAULTS


class AsyncClient:
    """A producer's side of one queue, for one event loop: an ``async with`` block, or closed by ``aclose``.

    It takes the words of ``Client`` and keeps its promises. Any number of tasks may share one: it has one connection
    for all calls and one more while anything is waited for. Endings are announced to its ``name``.
    """

    def __init__(self, broker: AsyncBroker | str, queue: str = DEFAULTS.queue, *, name: str | None = None) -> None:
        self.broker = AsyncBroker(connect_async(broker), queue) if isinstance(broker, str) else broker
        self.name = name or uuid.uuid4().hex
        self._outage = Outage(lambda: asyncio.get_running_loop().time())
        self._inbox = Inbox(self.broker, self.name, self._outage)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop waiting and close the connections; requests stay on the queue."""
        await self._inbox.aclose()
        await self.broker.aclose()

    async def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        when_full: WhenFull = "wait",
        timeout: float | None = None,
        **params: Any,
    ) -> str:
        """Put one request on the queue and return its id, as ``Client.submit`` does."""
        request = self._request(prompt, messages, params)
        return await self._submit(request, when_full, _deadline(timeout))

    async def send(self, request: StrictRequest, *, when_full: WhenFull = "wait", timeout: float | None = None) -> str:
        """The same with a request that is made already."""
        return await self._submit(msgspec.structs.replace(request, reply_to=self.name), when_full, _deadline(timeout))

    async def wait(
        self, request_id: str, timeout: float | None = None, *, request: StrictRequest | None = None
    ) -> Reply:
        """The reply to a request; raises NoReplyError after ``timeout`` seconds, and ReplyGoneError.

        With the ``request`` itself, one that the broker has forgotten is sent again.
        """
        return await self._wait(Waiter(request_id, request), _deadline(timeout))

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        when_full: WhenFull = "wait",
        **params: Any,
    ) -> Reply:
        """Submit one request and wait for its reply, both within ``timeout`` seconds."""
        return await self._answer(self._request(prompt, messages, params), when_full, _deadline(timeout))

    async def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        when_full: WhenFull = "wait",
        cancel_on_close: bool = False,
        **params: Any,
    ) -> AsyncTextStream:
        """Submit one request; its text is read from what this returns, as it is made."""
        deadline = _deadline(timeout)
        request = self._request(prompt, messages, {**params, "stream": True})
        request_id = await self._submit(request, when_full, deadline)
        waiter = Waiter(request_id, request, after="0-0")
        return AsyncTextStream(self, waiter, deadline, cancel_on_close=cancel_on_close)

    def read(
        self, request_id: str, *, after: str = "0-0", timeout: float | None = None, cancel_on_close: bool = False
    ) -> AsyncTextStream:
        """The text of a request submitted with ``stream=True``, from the start or after an entry already read."""
        waiter = Waiter(request_id, after=after)
        return AsyncTextStream(self, waiter, _deadline(timeout), cancel_on_close=cancel_on_close)

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> str:
        """End a request with what it has so far; answers as ``Client.cancel`` does."""
        cancel = partial(self.broker.call, calls.cancel(self.broker.keys, request_id))
        with self._in_time(f"request `{request_id}` could not be cancelled in time"):
            async with asyncio.timeout_at(_deadline(timeout)):
                return await self._outage.insist(cancel)

    async def map(
        self, prompts: Iterable[Prompt | Mapping[str, Any]], *, window: int = WINDOW, **params: Any
    ) -> AsyncIterator[Reply]:
        """Answer many requests, at most ``window`` of them on the queue at a time; the replies come in input order.

        Each item is a prompt or the fields of a request; ``params`` are fields of all. What is no valid request is
        answered with an error. Close the iterator (``contextlib.aclosing``) to cancel what is not answered.
        """
        line = _Line(self, iter(prompts), window, {"reply_to": self.name, **params})
        try:
            async for reply in line.replies():
                yield reply
        finally:
            await line.close()

    def _request(self, prompt: Prompt | None, messages: Messages | None, params: dict[str, Any]) -> StrictRequest:
        return make_request(prompt, messages, **{"reply_to": self.name, **params})

    async def _submit(self, request: StrictRequest, when_full: WhenFull, deadline: float | None) -> str:
        while True:
            try:
                with self._in_time("the request could not be enqueued in time"):
                    async with asyncio.timeout_at(deadline):
                        return await self._outage.insist(partial(send_async, self.broker, request))
            except QueueFullError as full:
                remaining = math.inf if deadline is None else deadline - asyncio.get_running_loop().time()
                if when_full == "raise" or remaining <= 0:
                    raise
                await asyncio.sleep(min(full.retry_after, remaining))

    async def _answer(self, request: StrictRequest, when_full: WhenFull, deadline: float | None) -> Reply:
        request_id = await self._submit(request, when_full, deadline)
        return await self._wait(Waiter(request_id, request), deadline)

    async def _wait(self, waiter: Waiter, deadline: float | None) -> Reply:
        try:
            with self._in_time(f"no reply to request `{waiter.request_id}` in time; it stays on the queue"):
                async with asyncio.timeout_at(deadline):
                    await self._inbox.join(waiter)
                    return await waiter.reply
        finally:
            self._inbox.leave(waiter)

    @contextmanager
    def _in_time(self, otherwise: str) -> Iterator[None]:
        """Say why the time was not enough."""
        try:
            yield
        except TimeoutError:
            if self._outage.error is not None:
                raise self._outage.error from None
            raise NoReplyError(otherwise) from None


class AsyncTextStream:
    """Iterates over the text of one request, piece by piece, and then has its ``reply``; see ``TextStream``.

    Use it as an ``async with`` block: a loop that is left early does not close it by itself.
    """

    def __init__(self, client: AsyncClient, waiter: Waiter, deadline: float | None, *, cancel_on_close: bool) -> None:
        self.request_id = waiter.request_id
        self.position = waiter.position or "0-0"
        self._reply: Reply | None = None
        self._client = client
        self._waiter = waiter
        self._deadline = deadline
        self._cancel_on_close = cancel_on_close
        self._entries: deque[TokenEntry] = deque()  # arrived, not yet given out
        self._joined = self._ended = False

    @property
    def reply(self) -> Reply:
        """The reply, once the text has been read to its end."""
        if self._reply is None:
            raise RuntimeError("read the stream to its end first")
        return self._reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            while self._entries:
                entry = self._entries.popleft()
                self.position = entry.entry_id
                if entry.text:
                    return entry.text
            if self._reply is not None:
                raise StopAsyncIteration
            fate = "is cancelled" if self._cancel_on_close else "stays on the queue"
            try:
                with self._client._in_time(f"request `{self.request_id}` did not finish in time; it {fate}"):
                    async with asyncio.timeout_at(self._deadline):
                        await self._read()
            except TokenmillError:
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Stop reading; cancel the request, if that was asked for and it has not been read to its end."""
        self._client._inbox.leave(self._waiter)
        if self._cancel_on_close and self._reply is None:
            self._cancel_on_close = False
            with suppress(BrokerUnreachableError):  # whoever closes does not want to wait
                await self._client.broker.call(calls.cancel(self._client.broker.keys, self._waiter.request_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _read(self) -> None:
        """Wait for entries, and once the last one is there for the reply that came with it."""
        inbox, waiter = self._client._inbox, self._waiter
        if self._ended:
            self._reply = await waiter.reply
            inbox.leave(waiter)
            return
        if not self._joined:
            self._joined = True
            await inbox.join(waiter)
        await waiter.news.wait()
        waiter.news.clear()
        self._entries.extend(waiter.take())
        self._ended = bool(self._entries) and self._entries[-1].end is not None
        if self._ended:
            await inbox.look([waiter.request_id])
        elif waiter.reply.done():
            self._entries.extend(await inbox.rest(waiter))
            self._ended = True


class _Line:
    """Requests in input order: begun as others end, answered in order."""

    def __init__(
        self, client: AsyncClient, prompts: Iterator[Prompt | Mapping[str, Any]], window: int, params: dict[str, Any]
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._params = params
        self._free = asyncio.Semaphore(window)
        self._room = asyncio.Semaphore(REORDER)
        self._order: asyncio.Queue[asyncio.Task[Reply] | None] = asyncio.Queue()
        self._running: dict[asyncio.Task[Reply], str] = {}
        self._filler = asyncio.create_task(self._fill())

    async def replies(self) -> AsyncIterator[Reply]:
        """The replies, in order; raises what went wrong with the input after those before it."""
        while (task := await self._order.get()) is not None:
            yield await task
            self._room.release()
        await self._filler

    async def close(self) -> None:
        """Cancel requests that nobody will read, as far as the broker can be reached."""
        unread = dict(self._running)
        for task in (self._filler, *unread):
            task.cancel()
        await asyncio.gather(self._filler, *unread, return_exceptions=True)
        broker = self._client.broker
        with suppress(TokenmillError):
            await broker.all([calls.cancel(broker.keys, request_id) for request_id in unread.values()])

    async def _fill(self) -> None:
        try:
            for item in self._prompts:
                await self._room.acquire()
                await self._free.acquire()
                request = as_request(item, self._params)
                task = asyncio.create_task(self._answer(request))
                self._running[task] = request.id
                task.add_done_callback(self._ended)
                self._order.put_nowait(task)
        finally:
            self._order.put_nowait(None)

    def _ended(self, task: asyncio.Task[Reply]) -> None:
        del self._running[task]
        self._free.release()

    async def _answer(self, request: StrictRequest | Reply) -> Reply:
        if isinstance(request, Reply):
            return request
        try:
            reply = await self._client._answer(request, "wait", None)
        except (IdInUseError, ReplyGoneError) as error:
            return refusal(request.id, str(error))
        # Under a known idempotency key the reply is another's, and others may wait for that one.
        return msgspec.structs.replace(reply, id=request.id)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else asyncio.get_running_loop().time() + timeout
