"""The broker as it should be, in plain Python: what the state machine compares the real one with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.shared.broker import Checkpoint, Finish

from .driver import body

IDS = ("a", "b", "c", "s1", "s2")  # the last two stream
BAD_PUSHES = (b'{"id":"%s","prompt":', b'{"id":"%s"} trailing')
UNREADABLE = (b"\xff\xfe", b"[]", b'{"id":7}', b"", b'{"id":"no spaces"}')
LISTS = ("high", "requests", "low")
TURNS = 3 * ["high", "high", "high", "requests"] + ["high", "high", "high", "low"]
POKE = b"~"
TIMEOUT_MS = 10_000_000


def push_of(request_id: str, variant: int) -> bytes:
    timeout = {"timeout_ms": TIMEOUT_MS} if variant else {}
    return body(request_id, variant, stream=request_id.startswith("s"), **timeout)


def has_deadline(payload: bytes) -> bool:
    return b"timeout_ms" in payload


def text_of(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


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
    cost: int = 0
    reply: bytes | None = None  # as a worker wrote it; None: the broker did, with this text
    text: str = ""
    cancelled: bool = False
    watched: bool = False  # its deadline is among those to be swept
    overdue: bool = False
    husk: bool = False
    crashes: int = 0
    crashes_alone: int = 0
    alone: bool = False
    claimed_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.state not in ("waiting", "running")

    @property
    def called_off(self) -> str | None:
        return "cancelled" if self.cancelled else "deadline" if self.overdue else None


class Model:
    """The broker as it should be, one queue, no clock: leases lapse and deadlines pass when they are told to."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.lists: dict[str, list[bytes]] = {name: [] for name in LISTS}
        self.resume: list[str] = []
        self.suspects: list[str] = []
        self.lapsed: set[str] = set()
        self.tombstones: set[str] = set()
        self.keys: dict[str, tuple[Any, str]] = {}
        self.dead: list[tuple[str, bytes]] = []
        self.limits = (0, 0)
        self.turn = self.last_fence = 0
        self.solo: str | None = None
        self.suspended = False
        self.fingerprint: str | None = None
        self.workers: set[str] = set()

    def depth(self) -> int:
        pushed = sum(len(pushes) for pushes in self.lists.values()) - self.lists["requests"][:1].count(POKE)
        return pushed - self.husks() + len(self.resume) + len(self.suspects)

    def husks(self) -> int:
        return sum(entry.husk for entry in self.entries.values())

    def queued_tokens(self) -> int:
        return sum(entry.cost for entry in self.entries.values() if entry.state == "waiting" and not entry.deliveries)

    def owned(self, worker: str) -> dict[str, int]:
        mine = [(i, e.fence) for i, e in self.entries.items() if e.state == "running" and e.worker == worker]
        return dict(sorted(mine, key=lambda pair: pair[1]))

    def running(self) -> set[str]:
        return {i for i, e in self.entries.items() if e.state == "running"}

    def holder(self, request_id: str, fence: int) -> Entry | None:
        entry = self.entries.get(request_id)
        return entry if entry and entry.state == "running" and entry.fence == fence else None

    # what producers and operators do

    def enqueue(self, request_id: str, variant: int, priority: str, cost: int, key: str | None) -> tuple[str, str, str]:
        """Status, state and id of the answer."""
        payload = push_of(request_id, variant)
        said = {name: value for name, value in json.loads(payload).items() if name != "id"}
        if key in self.keys:
            first_said, first = self.keys[key]
            state = self.entries[first].state if first in self.entries else "forgotten"
            return ("duplicate" if first_said == said else "conflict"), state, first
        entry = self.entries.get(request_id)
        if entry:
            return ("duplicate" if entry.body == payload else "conflict"), entry.state, request_id
        (max_depth, max_tokens), queued = self.limits, self.queued_tokens()
        if 0 < max_depth <= self.depth() or (queued and 0 < max_tokens < queued + cost):
            return "full", "", request_id
        if key:
            self.keys[key] = (said, request_id)
        entry = self.entries[request_id] = Entry(body=payload, stream=request_id.startswith("s"), cost=cost)
        if request_id in self.tombstones:
            self.tombstones.discard(request_id)
            self.end(request_id, "cancelled")
        else:
            entry.watched = has_deadline(payload)
            if priority != "normal":
                self.poke()
            self.lists["requests" if priority == "normal" else priority].append(payload)
        return "ok", entry.state, request_id

    def cancel(self, request_id: str) -> str:
        entry = self.entries.get(request_id)
        if entry is None:
            self.tombstones.add(request_id)
            return "remembered"
        if entry.state == "waiting":
            self.end_waiting(request_id, "cancelled")
            return "cancelled"
        if entry.state != "running":
            return entry.state
        entry.cancelled = True
        return "signalled"

    def empty(self) -> int:
        waiting: list[str] = [*self.resume, *self.suspects]
        for request_id in waiting:
            self.end(request_id, "cancelled")
        self.resume, self.suspects = [], []
        for pushes in self.lists.values():
            while pushes:
                if opened := self.open(pushes.pop(0)):
                    self.end(opened, "cancelled")
                    waiting.append(opened)
        return len(waiting)

    def requeue(self, index: int) -> str:
        request_id, payload = self.dead[index]
        entry = self.entries.get(request_id)
        if not payload:
            return "cut"
        if entry and (entry.state != "error" or entry.husk):
            return "in use"
        del self.dead[index]
        self.forget(request_id)
        self.lists["requests"].append(payload)
        return "ok"

    def forget(self, request_id: str) -> None:
        """So long after its end that the broker has forgotten it."""
        self.entries.pop(request_id, None)
        self.tombstones.discard(request_id)

    # what workers do

    def finish(self, item: Finish) -> int:
        entry = self.entries.get(item.id)
        if not entry or entry.fence != item.fence:
            return 0
        if entry.state != "running":
            return 1
        if entry.stream:
            self.append(entry, item.start, item.token_ids)
        entry.state, entry.reply = item.finish_reason, item.body
        self.clear(item.id)
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
        owned = self.owned(worker)
        unseen = [request_id for request_id, fence in owned.items() if fence > ack]
        if unseen:
            return unseen
        claimed: list[str] = []
        free = slots - len(owned)
        if free <= 0 or self.suspended:
            return claimed

        def begin(request_id: str | None, alone: bool = False) -> None:
            if request_id and (reason := self.entries[request_id].called_off):
                self.end(request_id, reason)
            elif request_id:
                entry = self.entries[request_id]
                entry.state, entry.worker, entry.fence = "running", worker, fences(request_id)
                entry.deliveries, entry.alone, entry.claimed_tokens = entry.deliveries + 1, alone, len(entry.tokens)
                claimed.append(request_id)

        if self.is_for_a_suspect(worker):
            while self.suspects and not owned and not claimed:
                begin(self.suspects.pop(0), True)
            return claimed
        while self.resume and len(claimed) < free:
            begin(self.resume.pop(0))
        while any(self.lists.values()) and len(claimed) < free:
            begin(self.open(self.next_push()))
        return claimed

    def is_for_a_suspect(self, worker: str) -> bool:
        """Whether the worker gets nothing else now."""
        runs_one = any(self.entries[request_id].alone for request_id in self.owned(worker))
        if not runs_one and not self.suspects:
            return False
        if self.solo not in (None, worker):
            return runs_one
        self.solo = worker
        return True

    def next_push(self) -> bytes:
        turn = TURNS[self.turn]
        name = turn if self.lists[turn] else next(name for name in LISTS if self.lists[name])
        push = self.lists[name].pop(0)
        if push != POKE:
            self.turn = (self.turn + 1) % len(TURNS)
        return push

    def open(self, payload: bytes) -> str | None:
        """Id of the request that a push brings to life, if it does."""
        if payload in UNREADABLE:
            self.dead.append(("", payload))
        for request_id in IDS:
            entry = self.entries.get(request_id)
            if payload in [bad % request_id.encode() for bad in BAD_PUSHES]:
                self.dead.append((request_id, payload))
                if entry is None:
                    self.entries[request_id] = Entry()
                    self.end(request_id, "error")
                    self.tombstones.discard(request_id)
            if payload in (push_of(request_id, 0), push_of(request_id, 1)):
                return self.open_good(request_id, payload)
        return None

    def open_good(self, request_id: str, payload: bytes) -> str | None:
        entry = self.entries.get(request_id)
        if entry is None:
            cancelled = request_id in self.tombstones
            self.tombstones.discard(request_id)
            fresh = Entry(body=payload, stream=request_id.startswith("s"), cancelled=cancelled)
            fresh.watched = has_deadline(payload)
            self.entries[request_id] = fresh
            return request_id
        if entry.body != payload:
            return None
        entry.husk = False
        return request_id if entry.state == "waiting" and not entry.deliveries else None

    def register(self, worker: str, fingerprint: str) -> str:
        in_use = self.workers - {worker} or self.depth() > 0 or self.running()
        if self.fingerprint not in (None, fingerprint) and in_use:
            return str(self.fingerprint)
        self.fingerprint = fingerprint
        self.workers.add(worker)
        return fingerprint

    # how requests go back and end

    def release(self, worker: str, held: list[tuple[str, int]]) -> int:
        mine = [request_id for request_id, fence in dict.fromkeys(held) if self.holder(request_id, fence)]
        for request_id in mine:
            self.give_back(request_id)
        self.solo = None if self.solo == worker else self.solo
        self.workers.discard(worker)
        return len(mine)

    def reclaim(self, limit: int) -> int:
        lapsed = sorted(self.lapsed)[:limit]
        for request_id in lapsed:
            entry = self.entries[request_id]
            if not entry.called_off:
                self.charge(entry)
            if entry.crashes_alone >= 2:
                self.dead.append((request_id, entry.body))
                self.end(request_id, "error")
            else:
                self.give_back(request_id)
        due = sorted(i for i, e in self.entries.items() if e.watched and e.overdue)[:limit]
        ended = [request_id for request_id in due if self.entries[request_id].state == "waiting"]
        for request_id in due:
            self.entries[request_id].watched = False
        for request_id in ended:
            self.end_waiting(request_id, "deadline")
        return len(lapsed) + len(ended)

    @staticmethod
    def charge(entry: Entry) -> None:
        if len(entry.tokens) > entry.claimed_tokens:
            entry.crashes = entry.crashes_alone = 0
        else:
            entry.crashes += 1
            entry.crashes_alone += entry.alone

    def give_back(self, request_id: str) -> None:
        entry = self.entries[request_id]
        self.lapsed.discard(request_id)
        if entry.called_off:
            return self.end(request_id, entry.called_off)
        entry.state, entry.fence, entry.alone = "waiting", 0, False
        (self.suspects if entry.crashes >= 2 else self.resume).append(request_id)
        self.poke()
        return None

    def end_waiting(self, request_id: str, reason: str) -> None:
        entry = self.entries[request_id]
        self.end(request_id, reason)
        if entry.deliveries:
            (self.suspects if request_id in self.suspects else self.resume).remove(request_id)
        else:
            entry.husk = True

    def end(self, request_id: str, reason: str) -> None:
        """The broker itself ends a request."""
        entry = self.entries[request_id]
        entry.state, entry.fence, entry.text = reason, 0, text_of(entry.tokens)
        self.clear(request_id)

    def clear(self, request_id: str) -> None:
        """Drop what a finished request no longer needs."""
        entry = self.entries[request_id]
        if not entry.stream:
            entry.tokens = []
        entry.watched = False
        self.lapsed.discard(request_id)

    def poke(self) -> None:
        if not self.lists["requests"]:
            self.lists["requests"].append(POKE)
