"""A broker in memory, with as much of the real one's behaviour as a producer can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from tokenmill.shared.broker import Broker, Enqueued, QueueInfo, TokenEntry, WorkerInfo
from tokenmill.shared.protocol import FinishReason, Reply, ReplyError, Request, Usage


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


class FakeBroker:
    """Keeps what is enqueued; the test answers, and moves the clock that waiting moves too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.payloads: dict[str, bytes] = {}
        self.states: dict[str, str] = {}
        self.replies: dict[str, bytes] = {}
        self.entries: dict[str, list[TokenEntry]] = {}
        self.workers: list[WorkerInfo] = []

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

    def enqueue(self, request_id: str, payload: bytes, *, stream: bool = False) -> Enqueued:
        known = self.payloads.setdefault(request_id, payload)
        if request_id in self.states:
            return Enqueued("duplicate" if known == payload else "conflict", self.states[request_id], 0)
        self.states[request_id] = "waiting"
        return Enqueued("ok", "waiting", len(self.payloads))

    def wait_reply(self, request_id: str, timeout_s: float) -> bytes | None:
        if request_id not in self.replies:
            self.now += timeout_s
        return self.replies.get(request_id)

    def read_replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        return [self.replies.get(request_id) for request_id in request_ids]

    def read_tokens(self, request_id: str, after: str = "0", block_ms: int = 0) -> list[TokenEntry]:
        fresh = [entry for entry in self.entries.get(request_id, []) if entry.entry_id > after]
        if not fresh:
            self.now += block_ms / 1000
        return fresh[:2]

    def info(self) -> QueueInfo:
        return QueueInfo(len(self.payloads), 0, 0, None, self.workers, {})
