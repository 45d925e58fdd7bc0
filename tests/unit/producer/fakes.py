"""A broker in memory, with as much of the real one's behaviour as a producer can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from tokenmill.shared.broker import Broker, DeadLetter, Enqueued, QueueInfo, TokenEntry, WorkerInfo
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.shared.protocol import FinishReason, Reply, ReplyError, Request, Usage

EMPTY_QUEUE = QueueInfo(
    waiting=0,
    high=0,
    normal=0,
    low=0,
    resume=0,
    suspects=0,
    running=0,
    dead=0,
    suspended=False,
    model=None,
    queued_tokens=0,
    max_queued_tokens=0,
    max_depth=0,
    oldest_age_ms=None,
    workers=[],
    stats={},
)


def make_reply(request_id: str, text: str = "fine", *, finish_reason: FinishReason = "stop", **fields: object) -> Reply:
    """A reply."""
    usage = Usage(prompt_tokens=3, output_tokens=len(text))
    reply = Reply(id=request_id, finish_reason=finish_reason, text=text, usage=usage)
    for name, value in fields.items():
        setattr(reply, name, value)
    return reply


def make_error(request_id: str, message: str = "it broke") -> Reply:
    """An error reply."""
    error = ReplyError(code="model_error", message=message)
    return make_reply(request_id, "", finish_reason="error", error=error)


def make_worker(name: str = "w1", *, busy: int = 0, **status: object) -> WorkerInfo:
    """A worker as the broker shows it."""
    return WorkerInfo(name, 100, busy, {"state": "running", "model": "toy", "slots": 8, **status})


class FakeKeys(NamedTuple):
    """As much of the keys as producers look at."""

    queue: str = "mine"


class FakeBroker:
    """Keeps what is enqueued; the test answers, and moves the clock that waiting moves too."""

    keys = FakeKeys()
    address = "here"

    def __init__(self) -> None:
        self.now = 0.0
        self.away_until = -1.0
        self.full_until = -1.0
        self.payloads: dict[str, bytes] = {}
        self.options: dict[str, dict[str, Any]] = {}  # of each enqueue
        self.states: dict[str, str] = {}
        self.first: dict[str, str] = {}  # idempotency key → id
        self.replies: dict[str, bytes] = {}
        self.entries: dict[str, list[TokenEntry]] = {}
        self.cancelled: list[str] = []
        self.workers: list[WorkerInfo] = []
        self.letters: list[DeadLetter] = []
        self.requeue_answers: dict[str, str] = {}
        self.settings = EMPTY_QUEUE

    def as_broker(self) -> Broker:
        """This fake, as the type that producers ask for."""
        return cast("Broker", self)

    def clock(self) -> float:
        return self.now

    def requests(self) -> list[Request]:
        """What was enqueued, decoded."""
        return [msgspec.json.decode(payload, type=Request) for payload in self.payloads.values()]

    def answer(self, reply: Reply) -> None:
        """Post a reply."""
        self.replies[reply.id] = msgspec.json.encode(reply)
        self.states[reply.id] = reply.finish_reason

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> None:
        """Be reached, or not."""
        if self.now < self.away_until:
            raise BrokerUnreachableError("no broker at here: gone")

    def enqueue(
        self, request_id: str, payload: bytes, *, idempotency_key: str | None = None, **options: Any
    ) -> Enqueued:
        self.look()
        about = self.first.get(idempotency_key or "", request_id)
        if about in self.states:
            known = self.payloads[about].replace(about.encode(), request_id.encode())
            return self._enqueued("duplicate" if known == payload else "conflict", about)
        if self.now < self.full_until:
            return self._enqueued("full", about)
        self.payloads[about], self.options[about], self.states[about] = payload, options, "waiting"
        if idempotency_key is not None:
            self.first[idempotency_key] = about
        return self._enqueued("ok", about)

    def _enqueued(self, status: Literal["ok", "duplicate", "conflict", "full"], about: str) -> Enqueued:
        retry_after_ms = 1500 if status == "full" else 0
        return Enqueued(status, self.states.get(about, ""), len(self.payloads), about, 0, retry_after_ms)

    def state(self, request_id: str) -> str | None:
        self.look()
        return self.states.get(request_id)

    def cancel(self, request_id: str) -> str:
        self.look()
        self.cancelled.append(request_id)
        state = self.states.get(request_id, "remembered")
        return {"waiting": "cancelled", "running": "signalled"}.get(state, state)

    def wait_reply(self, request_id: str, timeout_s: float) -> bytes | None:
        self.look()
        if request_id not in self.replies:
            self.now += timeout_s
        return self.replies.get(request_id)

    def read_replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        self.look()
        return [self.replies.get(request_id) for request_id in request_ids]

    def read_tokens(self, request_id: str, after: str = "0", block_ms: int = 0) -> list[TokenEntry]:
        self.look()
        fresh = [entry for entry in self.entries.get(request_id, []) if entry.entry_id > after]
        if not fresh:
            self.now += block_ms / 1000
        return fresh[:2]

    def info(self) -> QueueInfo:
        self.look()
        return self.settings._replace(waiting=len(self.payloads), workers=self.workers)

    def set_limits(self, max_depth: int | None = None, max_queued_tokens: int | None = None) -> None:
        limits = {"max_depth": max_depth, "max_queued_tokens": max_queued_tokens}
        self.settings = self.settings._replace(**{name: limit for name, limit in limits.items() if limit is not None})

    def suspend(self) -> None:
        self.settings = self.settings._replace(suspended=True)

    def resume(self) -> None:
        self.settings = self.settings._replace(suspended=False)

    def empty(self) -> int:
        return 3

    def dead_letters(self, *, count: int = 100, after: str | None = None) -> list[DeadLetter]:
        return [letter for letter in self.letters if after is None or letter.entry_id > after][: min(count, 2)]

    def dead_letter(self, entry_id: str) -> DeadLetter | None:
        return next((letter for letter in self.letters if letter.entry_id == entry_id), None)

    def requeue_dead(self, entry_id: str) -> str:
        if entry_id in self.requeue_answers:
            return self.requeue_answers[entry_id]
        return "ok" if self.drop_dead(entry_id) else "gone"

    def drop_dead(self, entry_id: str | None = None) -> int:
        kept = [letter for letter in self.letters if entry_id not in (None, letter.entry_id)]
        dropped = len(self.letters) - len(kept)
        self.letters = kept
        return dropped
