"""The client: submit a request to a queue, wait for its reply, or read its output as it is made."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tokenmill.producer.request import check_request, send
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import Reply
from tokenmill.shared.settings import DEFAULTS

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, str]]

_BLOCK_S = 1.0  # longest single blocking read, so that a deadline and a Ctrl-C are never far

_decoder = msgspec.json.Decoder(Reply)


class NoReplyError(TokenmillError):
    """No reply came in time; the request may still be answered later."""


class Client:
    """A producer's side of one queue; not to be shared by threads while it waits.

    Sampling parameters are the fields of ``protocol.SamplingParams``, as keywords.
    """

    def __init__(
        self, broker: Broker | str, queue: str = DEFAULTS.queue, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.broker = Broker(connect(broker), queue) if isinstance(broker, str) else broker
        self._clock = clock

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        id: str | None = None,  # noqa: A002 (the name it has on the wire)
        **params: Any,
    ) -> str:
        """Put one request on the queue and return its id; raises UsageError when it is not a valid request.

        The same request under the same id is enqueued once; another one under an id in use raises IdInUseError.
        """
        fields = {"id": id or uuid.uuid4().hex, **params}
        if prompt is not None:
            fields["prompt"] = prompt
        if messages is not None:
            fields["messages"] = messages
        request = check_request(fields)
        send(self.broker, request)
        return request.id

    def wait(self, request_id: str, timeout: float | None = None) -> Reply:
        """The reply to a request; raises NoReplyError after ``timeout`` seconds (None waits as long as it takes)."""
        deadline = self._deadline(timeout)
        while (remaining := deadline - self._clock()) > 0:
            body = self.broker.wait_reply(request_id, min(remaining, _BLOCK_S))
            if body is not None:
                return _decoder.decode(body)
        raise NoReplyError(f"no reply to request `{request_id}` within {timeout:g} s; it stays on the queue")

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Reply:
        """Submit one request and wait for its reply."""
        return self.wait(self.submit(prompt, messages=messages, **params), timeout)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> TextStream:
        """Submit one request and read its text as it is made."""
        return self.read(self.submit(prompt, messages=messages, stream=True, **params), timeout=timeout)

    def read(self, request_id: str, *, after: str = "0-0", timeout: float | None = None) -> TextStream:
        """The text of a request submitted with ``stream=True``, from the start or after an entry already read."""
        return TextStream(self, request_id, after, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return float("inf") if timeout is None else self._clock() + timeout


class TextStream:
    """Iterates over the text of one request, piece by piece, and then has its ``reply``.

    ``position`` names the last entry read: ``Client.read(request_id, after=position)`` goes on there, in any process,
    without a repeated or a missing character.
    """

    def __init__(self, client: Client, request_id: str, after: str, deadline: float) -> None:
        self.request_id = request_id
        self.position = after
        self._reply: Reply | None = None
        self._client = client
        self._deadline = deadline

    @property
    def reply(self) -> Reply:
        """The reply, once the text has been read to its end."""
        if self._reply is None:
            raise RuntimeError("read the stream to its end first")
        return self._reply

    def __iter__(self) -> Iterator[str]:
        while self._reply is None:
            remaining = self._deadline - self._client._clock()
            if remaining <= 0:
                raise NoReplyError(f"request `{self.request_id}` did not finish in time; it stays on the queue")
            yield from self._read(min(remaining, _BLOCK_S))

    def _read(self, block_s: float) -> Iterator[str]:
        """One blocking read. A reply without an end entry belongs to a request that never reached its stream."""
        broker = self._client.broker
        answered = broker.read_replies([self.request_id])[0]
        block_ms = 0 if answered else int(block_s * 1000)
        entries = broker.read_tokens(self.request_id, self.position, block_ms)
        for entry in entries:
            self.position = entry.entry_id
            if entry.text:
                yield entry.text
            if entry.end is not None:
                self._reply = self._client.wait(self.request_id, _BLOCK_S)
                return
        if answered and not entries:
            self._reply = _decoder.decode(answered)
