"""The broker as it should be, in plain Python: what the state machine compares the real one with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.shared.broker import Checkpoint, Finish

from .driver import body

IDS = ("a", "b", "c", "d", "e", "s1", "s2", "s3")  # the last three stream
BAD_PUSHES = (b'{"id":"%s","prompt":', b'{"id":"%s"} trailing')
UNREADABLE = (b"\xff\xfe", b"[]", b'{"id":7}', b"", b'{"id":"no spaces"}')


def push_of(request_id: str, variant: int) -> bytes:
    return body(request_id, variant, stream=request_id.startswith("s"))


@dataclass
class Entry:
    """What the model knows of one request."""

    state: str = "waiting"
    body: bytes = b""
    fence: int = 0
    worker: str = ""
    deliveries: int = 0
    tokens: list[int] = field(default_factory=list)
    stream: bool = False
    reply: bytes = b""


class Model:
    """The broker as it should be, one queue, no clock: leases lapse when they are told to."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests: list[bytes] = []
        self.resume: list[str] = []
        self.lapsed: set[str] = set()
        self.last_fence = 0

    def owned(self, worker: str) -> dict[str, int]:
        mine = [(i, e.fence) for i, e in self.entries.items() if e.state == "running" and e.worker == worker]
        return dict(sorted(mine, key=lambda pair: pair[1]))

    def running(self) -> set[str]:
        return {i for i, e in self.entries.items() if e.state == "running"}

    def holder(self, request_id: str, fence: int) -> Entry | None:
        entry = self.entries.get(request_id)
        return entry if entry and entry.state == "running" and entry.fence == fence else None

    def enqueue(self, request_id: str, payload: bytes) -> tuple[str, str]:
        entry = self.entries.get(request_id)
        if entry:
            return ("duplicate" if entry.body == payload else "conflict"), entry.state
        self.entries[request_id] = Entry(body=payload, stream=request_id.startswith("s"))
        self.requests.append(payload)
        return "ok", "waiting"

    def finish(self, item: Finish) -> int:
        entry = self.entries.get(item.id)
        if not entry or entry.fence != item.fence:
            return 0
        if entry.state != "running":
            return 1
        if entry.stream:
            self.append(entry, item.start, item.token_ids)
        entry.state, entry.reply = item.finish_reason, item.body
        if not entry.stream:
            entry.tokens = []
        self.lapsed.discard(item.id)
        return 1

    def checkpoint(self, item: Checkpoint) -> int:
        entry = self.entries.get(item.id)
        if not entry or entry.fence != item.fence:
            return 0
        return self.append(entry, item.start, item.token_ids) if entry.state == "running" else 1

    @staticmethod
    def append(entry: Entry, start: int, token_ids: Any) -> int:
        if start + len(token_ids) <= len(entry.tokens):
            return 1
        if start != len(entry.tokens):
            return -1 - len(entry.tokens)
        entry.tokens += token_ids
        return 1

    def claim(self, worker: str, slots: int, ack: int, fences: Callable[[str], int]) -> list[str]:
        """Ids of the claims in the answer; ``fences`` tells which fence the broker gave to an id."""
        unseen = [request_id for request_id, fence in self.owned(worker).items() if fence > ack]
        if unseen:
            return unseen
        claimed: list[str] = []
        free = slots - len(self.owned(worker))
        while free > len(claimed) and (self.resume or self.requests):
            request_id = self.resume.pop(0) if self.resume else self.open(self.requests.pop(0))
            if request_id:
                entry = self.entries[request_id]
                entry.state, entry.worker, entry.fence = "running", worker, fences(request_id)
                entry.deliveries += 1
                claimed.append(request_id)
        return claimed

    def open(self, payload: bytes) -> str | None:
        """Id of the request that a push brings to life, if it does."""
        for request_id in IDS:
            if payload in [bad % request_id.encode() for bad in BAD_PUSHES]:
                self.entries.setdefault(request_id, Entry("error", reply=b"refused"))
            if payload in (push_of(request_id, 0), push_of(request_id, 1)):
                fresh = Entry(body=payload, stream=request_id.startswith("s"))
                entry = self.entries.setdefault(request_id, fresh)
                first = entry.state == "waiting" and entry.body == payload
                return request_id if first else None
        return None

    def give_back(self, request_id: str) -> None:
        entry = self.entries[request_id]
        entry.state, entry.fence = "waiting", 0
        self.lapsed.discard(request_id)
        self.resume.append(request_id)
