"""The client: submit a request to a queue, wait for its reply, read its output as it is made, or cancel it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self, TypeVar, get_args

import msgspec

from tokenmill.producer.feed import WINDOW, Feed, as_request
from tokenmill.producer.outage import Outage
from tokenmill.producer.request import Messages, Prompt, QueueFullError, make_request, send
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError
from tokenmill.shared.protocol import FinishReason, Reply
from tokenmill.shared.settings import DEFAULTS

WhenFull = Literal["wait", "raise"]
T = TypeVar("T")

_BLOCK_S = 1.0  # longest single blocking read, so that a deadline and a Ctrl-C are never far
FINISHED = get_args(FinishReason)

_decoder = msgspec.json.Decoder(Reply)


class NoReplyError(TokenmillError):
    """No reply came in time; the request may still be answered later."""


class ReplyGoneError(TokenmillError):
    """The request was answered, but its reply was taken by another reader or has expired."""

    def __init__(self, request_id: str, state: str) -> None:
        super().__init__(
            f"request `{request_id}` ended ({state}), but its reply was taken by another reader or has expired"
        )


class Client:
    """A producer's side of one queue; not to be shared by threads while it waits.

    Request fields (``protocol.Request``) are keywords: ``priority``, ``timeout_ms``, ``idempotency_key``, sampling. A
    broker that goes away is waited for as long as the call's ``timeout`` in seconds allows (None: for ever), unless it
    never answered. BrokerUnreachableError says that it did not come back in time.
    """

    def __init__(
        self,
        broker: Broker | str,
        queue: str = DEFAULTS.queue,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.broker = Broker(connect(broker), queue) if isinstance(broker, str) else broker
        self._clock = clock
        self._sleep = sleep
        self._outage = Outage(clock)

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        id: str | None = None,  # noqa: A002 (the name it has on the wire)
        when_full: WhenFull = "wait",
        timeout: float | None = None,
        **params: Any,
    ) -> str:
        """Put one request on the queue and return its id; raises UsageError when it is not a valid request.

        The same request under the same id, or under the same ``idempotency_key``, is enqueued once: the id is that of
        the first. Another request under either raises IdInUseError. A full queue is waited for up to ``timeout``
        seconds, or not at all with ``when_full="raise"``; then QueueFullError says when to try again.
        """
        request = make_request(prompt, messages, id=id, **params)
        deadline = self._deadline(timeout)
        while True:
            try:
                return self._insist(partial(send, self.broker, request), deadline)
            except QueueFullError as full:
                remaining = deadline - self._clock()
                if when_full == "raise" or remaining <= 0:
                    raise
                self._sleep(min(full.retry_after, remaining))

    def wait(self, request_id: str, timeout: float | None = None) -> Reply:
        """The reply to a request; raises NoReplyError after ``timeout`` seconds (None waits as long as it takes).

        Raises ReplyGoneError when no reply can come any more.
        """
        deadline = self._deadline(timeout)
        while (remaining := deadline - self._clock()) > 0:
            read = partial(self.broker.wait_reply, request_id, min(remaining, _BLOCK_S))
            body = self._insist(read, deadline)
            if body is not None:
                return _decoder.decode(body)
            self._check_not_gone(request_id, deadline)
        raise NoReplyError(f"no reply to request `{request_id}` in time; it stays on the queue")

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Reply:
        """Submit one request and wait for its reply, both within ``timeout`` seconds."""
        started = self._clock()
        request_id = self.submit(prompt, messages=messages, timeout=timeout, **params)
        return self.wait(request_id, None if timeout is None else timeout - (self._clock() - started))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        cancel_on_close: bool = False,
        **params: Any,
    ) -> TextStream:
        """Submit one request and read its text as it is made."""
        deadline = self._deadline(timeout)
        request_id = self.submit(prompt, messages=messages, stream=True, timeout=timeout, **params)
        return TextStream(self, request_id, "0-0", deadline, cancel_on_close=cancel_on_close)

    def read(
        self, request_id: str, *, after: str = "0-0", timeout: float | None = None, cancel_on_close: bool = False
    ) -> TextStream:
        """The text of a request submitted with ``stream=True``, from the start or after an entry already read.

        With ``cancel_on_close`` the request is cancelled when the reading ends before the text does.
        """
        return TextStream(self, request_id, after, self._deadline(timeout), cancel_on_close=cancel_on_close)

    def map(
        self, prompts: Iterable[Prompt | Mapping[str, Any]], *, window: int = WINDOW, **params: Any
    ) -> Generator[Reply]:
        """Answer many requests, at most ``window`` of them on the queue at a time; the replies come in input order.

        Each item is a prompt or the fields of a request; ``params`` are fields of all. What is no valid request is
        answered with an error. Close the iterator to cancel what is not answered.
        """
        requests = (as_request(item, params) for item in prompts)
        feed = Feed(self.broker, requests, clock=self._clock, sleep=self._sleep)
        feed.window = window
        try:
            while not feed.done:
                yield from feed.poll(_BLOCK_S)
        finally:
            feed.cancel()

    def cancel(self, request_id: str, *, timeout: float | None = None) -> str:
        """End a request with what it has so far; harmless for one that is finished or unknown.

        Returns ``cancelled`` (it waited), ``signalled`` (its worker ends it), ``remembered`` (nobody knows it: a push
        under way ends when it comes), or the finish reason of one that had ended before.
        """
        return self._insist(partial(self.broker.cancel, request_id), self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return float("inf") if timeout is None else self._clock() + timeout

    def _insist(self, call: Callable[[], T], deadline: float) -> T:
        """What the call returns, tried again while the broker is away and there is time."""
        while True:
            try:
                answer = call()
            except BrokerUnreachableError as error:
                pause_s = self._outage.pause_s(error)
                if self._clock() + pause_s >= deadline:
                    raise
                self._sleep(pause_s)
            else:
                self._outage.over()
                return answer

    def _check_not_gone(self, request_id: str, deadline: float) -> None:
        """Raise ReplyGoneError if the request is finished and, looked at after that, its reply is not there."""
        state = self._insist(partial(self.broker.state, request_id), deadline)
        if state in FINISHED and self._insist(partial(self.broker.read_replies, [request_id]), deadline) == [None]:
            raise ReplyGoneError(request_id, str(state))


class TextStream:
    """Iterates over the text of one request, piece by piece, and then has its ``reply``.

    ``position`` names the last entry read: ``Client.read(request_id, after=position)`` goes on there, in any process,
    without a repeated or a missing character. Iteration that ends early closes the stream, as a ``with`` block does.
    """

    def __init__(self, client: Client, request_id: str, after: str, deadline: float, *, cancel_on_close: bool) -> None:
        self.request_id = request_id
        self.position = after
        self._reply: Reply | None = None
        self._client = client
        self._deadline = deadline
        self._cancel_on_close = cancel_on_close

    @property
    def reply(self) -> Reply:
        """The reply, once the text has been read to its end."""
        if self._reply is None:
            raise RuntimeError("read the stream to its end first")
        return self._reply

    def __iter__(self) -> Iterator[str]:
        try:
            while self._reply is None:
                remaining = self._deadline - self._client._clock()
                if remaining <= 0:
                    fate = "is cancelled" if self._cancel_on_close else "stays on the queue"
                    raise NoReplyError(f"request `{self.request_id}` did not finish in time; it {fate}")
                yield from self._read(min(remaining, _BLOCK_S))
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the request, if that was asked for and it has not been read to its end."""
        if self._cancel_on_close and self._reply is None:
            self._cancel_on_close = False
            with suppress(BrokerUnreachableError):  # whoever closes does not want to wait
                self._client.broker.cancel(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self, block_s: float) -> Iterator[str]:
        """One blocking read. A reply without an end entry belongs to a request that never reached its stream."""
        broker, insist = self._client.broker, self._client._insist
        answered = insist(partial(broker.read_replies, [self.request_id]), self._deadline)[0]
        block_ms = 0 if answered else int(block_s * 1000)
        entries = insist(partial(broker.read_tokens, self.request_id, self.position, block_ms), self._deadline)
        for entry in entries:
            self.position = entry.entry_id
            if entry.text:
                yield entry.text
            if entry.end is not None:
                remaining = self._deadline - self._client._clock()
                self._reply = self._client.wait(self.request_id, max(remaining, _BLOCK_S))  # it came with the entry
                return
        if answered and not entries:
            self._reply = _decoder.decode(answered)
        elif not entries:
            self._client._check_not_gone(self.request_id, self._deadline)
