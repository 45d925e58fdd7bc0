"""Feeding many requests through a queue: a bounded number outstanding, the replies given back in input order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from tokenmill.producer.request import IdInUseError, send
from tokenmill.shared.broker import Broker
from tokenmill.shared.protocol import Reply, ReplyError, StrictRequest, Usage

WINDOW = 256  # requests outstanding: enough to keep some dozens of slots busy, little enough to keep the broker small
SWEEP_S = 0.02  # between two looks at all outstanding replies; one look at 256 costs about 4 ms of processor time
REORDER = 100_000  # replies held back at most while an earlier request still runs

_decoder = msgspec.json.Decoder(Reply)


class Feed:
    """Enqueues requests as others are answered; ``poll`` gives the replies that are next in input order."""

    def __init__(
        self, broker: Broker, requests: Iterable[StrictRequest], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.window = WINDOW  # may be changed at any time
        self._broker = broker
        self._requests = iter(requests)
        self._clock = clock
        self._swept = clock()
        self._order: deque[str] = deque()  # enqueued, not yet given back
        self._outstanding: dict[str, int] = {}  # enqueued, not yet answered → max_tokens; oldest first
        self._ready: dict[str, Reply] = {}  # answered, not yet given back
        self._exhausted = False
        self.answered = 0
        self.answered_max_tokens = 0  # of the requests that are answered
        self.answered_tokens = 0  # what they really put out

    @property
    def done(self) -> bool:
        """Whether every request has been answered and its reply given back."""
        return self._exhausted and not self._order

    def poll(self, timeout_s: float) -> list[Reply]:
        """Wait up to ``timeout_s`` seconds for a reply; returns those that come next in input order, often none."""
        self._fill()
        if self._outstanding:
            oldest = next(iter(self._outstanding))
            self._take(oldest, self._broker.wait_reply(oldest, timeout_s))
            if self._clock() - self._swept >= SWEEP_S:
                self._sweep()
        replies = []
        while self._order and self._order[0] in self._ready:
            replies.append(self._ready.pop(self._order.popleft()))
        return replies

    def _fill(self) -> None:
        while not self._exhausted and len(self._outstanding) < self.window and len(self._order) < REORDER:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                return
            self._order.append(request.id)
            try:
                send(self._broker, request)
            except IdInUseError as error:
                self.answered_max_tokens += request.max_tokens
                self._answer(request.id, _refusal(request.id, str(error)))
            else:
                self._outstanding[request.id] = request.max_tokens

    def _sweep(self) -> None:
        """Take every reply that is there, so that a long request at the head keeps no slot empty."""
        outstanding = list(self._outstanding)
        for request_id, body in zip(outstanding, self._broker.read_replies(outstanding), strict=True):
            self._take(request_id, body)
        self._swept = self._clock()

    def _take(self, request_id: str, body: bytes | None) -> None:
        if body is not None:
            reply = _decoder.decode(body)
            self.answered_max_tokens += self._outstanding.pop(request_id)
            self.answered_tokens += reply.usage.output_tokens
            self._answer(request_id, reply)

    def _answer(self, request_id: str, reply: Reply) -> None:
        self._ready[request_id] = reply
        self.answered += 1


def _refusal(request_id: str, why: str) -> Reply:
    return Reply(
        id=request_id,
        finish_reason="error",
        text="",
        usage=Usage(prompt_tokens=0, output_tokens=0),
        error=ReplyError(code="invalid_request", message=why),
        deliveries=0,
    )
