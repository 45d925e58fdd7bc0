"""Feeding many requests through a queue: a bounded number outstanding, the replies given back in input order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from tokenmill.producer.request import IdInUseError, send
from tokenmill.shared.broker import Broker
from tokenmill.shared.protocol import Reply, ReplyError, StrictRequest, Usage

WINDOW = 256  # requests outstanding: enough to keep every slot busy, little enough to keep the broker small
REORDER = 100_000  # replies held back at most while an earlier request still runs

_decoder = msgspec.json.Decoder(Reply)


class Feed:
    """Enqueues requests as others are answered; ``poll`` gives the replies that are next in input order."""

    def __init__(self, broker: Broker, requests: Iterable[StrictRequest], *, window: int = WINDOW) -> None:
        self._broker = broker
        self._requests = iter(requests)
        self._window = window
        self._order: deque[str] = deque()  # enqueued, not yet given back
        self._outstanding: dict[str, None] = {}  # enqueued, not yet answered; oldest first
        self._ready: dict[str, Reply] = {}  # answered, not yet given back
        self._exhausted = False
        self.answered = 0

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
            others = list(self._outstanding)
            for request_id, body in zip(others, self._broker.read_replies(others), strict=True):
                self._take(request_id, body)
        replies = []
        while self._order and self._order[0] in self._ready:
            replies.append(self._ready.pop(self._order.popleft()))
        return replies

    def _fill(self) -> None:
        while not self._exhausted and len(self._outstanding) < self._window and len(self._order) < REORDER:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                return
            self._order.append(request.id)
            try:
                send(self._broker, request)
            except IdInUseError as error:
                self._answer(request.id, _refusal(request.id, str(error)))
            else:
                self._outstanding[request.id] = None

    def _take(self, request_id: str, body: bytes | None) -> None:
        if body is not None:
            del self._outstanding[request_id]
            self._answer(request_id, _decoder.decode(body))

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
