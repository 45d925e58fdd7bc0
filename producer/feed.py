"""Feeding many requests through a queue: a bounded number outstanding, the replies given back in input order."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from tokenmill.producer.outage import Outage
from tokenmill.producer.request import IdInUseError, Prompt, QueueFullError, check_request, send
from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import BrokerUnreachableError, UsageError
from tokenmill.shared.protocol import Reply, ReplyError, StrictRequest, Usage

WINDOW = 256  # requests outstanding: enough to keep some dozens of slots busy, little enough to keep the broker small
SWEEP_S = 0.02  # between two looks at all outstanding replies; one look at 256 costs about 4 ms of processor time
REORDER = 100_000  # replies held back at most while an earlier request still runs
DOUBT_S = 1.0  # between two questions whether the oldest request is still known

_decoder = msgspec.json.Decoder(Reply)


class _Sent(NamedTuple):
    request: StrictRequest
    reply_id: str  # whose reply answers it: under a known idempotency key another request's


class Feed:
    """Enqueues requests as others are answered; ``poll`` gives the replies that are next in input order.

    A reply among the requests is given back in its place: the refusal of what is no request, say.

    It waits by itself for room in a full queue and for a broker that is away. What the broker has forgotten, because it
    came back without its last second, is sent again. A reply that somebody else has taken becomes an error reply.
    """

    def __init__(
        self,
        broker: Broker,
        requests: Iterable[StrictRequest | Reply],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.window = WINDOW  # may be changed at any time
        self._broker = broker
        self._requests = iter(requests)
        self._clock = clock
        self._sleep = sleep
        self._outage = Outage(clock)
        self._swept = self._doubted = clock()
        self._room_at = clock()  # no earlier is a full queue asked again
        self._next: StrictRequest | Reply | None = None  # read, not yet accepted
        self._order: deque[str] = deque()  # accepted, not yet given back
        self._outstanding: dict[str, _Sent] = {}  # accepted, not yet answered; oldest first
        self._doubtful: deque[str] = deque()  # to be sent again: the broker may have forgotten them
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
        """Wait up to ``timeout_s`` seconds for a reply; returns those that come next in input order, often none.

        Raises BrokerUnreachableError if the broker never answered.
        """
        try:
            self._advance(timeout_s)
        except BrokerUnreachableError as error:
            self._sleep(self._outage.pause_s(error))
            self._doubtful = deque(self._outstanding)
        else:
            self._outage.over()
        replies = []
        while self._order and self._order[0] in self._ready:
            replies.append(self._ready.pop(self._order.popleft()))
        return replies

    def cancel(self) -> int:
        """Cancel what is outstanding, as far as the broker can be reached; returns how many requests."""
        own = [request_id for request_id, sent in self._outstanding.items() if sent.reply_id == request_id]
        with suppress(BrokerUnreachableError):
            for request_id in own:
                self._broker.cancel(request_id)
        return len(own)

    def _advance(self, timeout_s: float) -> None:
        self._fill()
        if not self._outstanding:
            if not self._exhausted:  # the queue is full of what others sent
                self._sleep(max(0.0, min(timeout_s, self._room_at - self._clock())))
            return
        oldest = next(iter(self._outstanding))
        self._take(oldest, self._broker.wait_reply(self._outstanding[oldest].reply_id, timeout_s))
        if self._clock() - self._swept >= SWEEP_S:
            self._sweep()
        if self._clock() - self._doubted >= DOUBT_S:
            self._doubted = self._clock()
            self._doubtful.append(oldest)
        self._send_doubtful()

    def _fill(self) -> None:
        """Send what there is room for, in the window and in the queue."""
        while not self._exhausted and len(self._outstanding) < self.window and len(self._order) < REORDER:
            if self._next is None:
                self._next = next(self._requests, None)
                self._exhausted = self._next is None
            if self._next is None or not self._accept(self._next):
                return
            self._order.append(self._next.id)
            self._next = None

    def _accept(self, item: StrictRequest | Reply) -> bool:
        if isinstance(item, Reply):
            self._ready[item.id] = item
            return True
        return self._clock() >= self._room_at and self._send(item)

    def _send(self, request: StrictRequest) -> bool:
        """Send a request, once more if need be; False: the queue is full."""
        try:
            reply_id = send(self._broker, request)
        except QueueFullError as full:
            self._room_at = self._clock() + full.retry_after
            return False
        except IdInUseError as error:
            self._outstanding.pop(request.id, None)
            self._answer(request, refusal(request.id, str(error)))
        else:
            self._outstanding[request.id] = _Sent(request, reply_id)
        return True

    def _send_doubtful(self) -> None:
        while self._doubtful and self._clock() >= self._room_at:
            sent = self._outstanding.get(self._doubtful[0])
            if sent is not None and not self._send(sent.request):
                return
            self._doubtful.popleft()

    def _sweep(self) -> None:
        """Take every reply that is there, so that a long request at the head keeps no slot empty."""
        outstanding = {request_id: sent.reply_id for request_id, sent in self._outstanding.items()}
        replies = self._broker.read_replies(list(outstanding.values()))
        for request_id, body in zip(outstanding, replies, strict=True):
            self._take(request_id, body)
        self._swept = self._clock()

    def _take(self, request_id: str, body: bytes | None) -> None:
        if body is not None:
            reply = _decoder.decode(body)
            reply.id = request_id
            self._answer(self._outstanding.pop(request_id).request, reply)

    def _answer(self, request: StrictRequest, reply: Reply) -> None:
        self._ready[request.id] = reply
        self.answered += 1
        self.answered_max_tokens += request.max_tokens
        self.answered_tokens += reply.usage.output_tokens


def as_request(item: Prompt | Mapping[str, Any], params: Mapping[str, Any]) -> StrictRequest | Reply:
    """The request that a prompt, or fields, and the fields common to all make; or its refusal."""
    fields = {**params, **(item if isinstance(item, Mapping) else {"prompt": item})}
    fields.setdefault("id", uuid.uuid4().hex)
    try:
        return check_request(fields)
    except UsageError as error:
        return refusal(str(fields["id"]), str(error))


def refusal(request_id: str, why: str) -> Reply:
    """The answer to what never came to the queue."""
    return Reply(
        id=request_id,
        finish_reason="error",
        text="",
        usage=Usage(prompt_tokens=0, output_tokens=0),
        error=ReplyError(code="invalid_request", message=why),
        deliveries=0,
    )
