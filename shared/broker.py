"""The calls to the broker: one method per script of ``scripts/``, and the reads of producers and operators."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

from tokenmill.shared import calls
from tokenmill.shared.calls import EnqueueOptions, token_entry, token_ids
from tokenmill.shared.connection import LONGEST_BLOCK_S, Connection, connect
from tokenmill.shared.errors import UsageError
from tokenmill.shared.info import read_info
from tokenmill.shared.records import (
    Checkpoint,
    Claim,
    DeadLetter,
    Enqueued,
    Exchanged,
    Finish,
    Lost,
    QueueInfo,
    TokenEntry,
    WorkerInfo,
)
from tokenmill.shared.settings import DEFAULTS

__all__ = [
    "Broker",
    "Checkpoint",
    "Claim",
    "DeadLetter",
    "Enqueued",
    "Exchanged",
    "Finish",
    "Lost",
    "QueueInfo",
    "TokenEntry",
    "WorkerInfo",
    "connect",
]

_EMPTY_LIMIT = 500  # requests that one call ends: it keeps the script short


class Broker(Connection):
    """One queue on one broker. Any call may be repeated after an error."""

    def enqueue(self, request_id: str, payload: bytes, **options: Unpack[EnqueueOptions]) -> Enqueued:
        """Push a request, once however often it is called: the same body under the same id is a ``duplicate``.

        With an idempotency key the id in the body does not matter: the same body under the same key is the first
        request, whatever its id. ``cost`` counts against the queue's limit of tokens until a worker begins the request.
        """
        if len(payload) > self._max_payload_bytes:
            raise UsageError(f"request {request_id}: {len(payload)} bytes, more than {self._max_payload_bytes}")
        return self._send(calls.enqueue(self.keys, request_id, payload, options))

    def cancel(self, request_id: str, *, reply_ttl_ms: int = DEFAULTS.reply_ttl_ms) -> str:
        """End a request with what it has so far: ``cancelled`` (it waited), ``signalled`` (its worker will end it),
        ``remembered`` (nobody knows it yet: a push under way ends when it comes), or the state of a finished one."""
        return self._send(calls.cancel(self.keys, request_id, reply_ttl_ms=reply_ttl_ms))

    def exchange(
        self,
        worker: str,
        *,
        slots: int,
        ack: int,
        lease_ms: int,
        reply_ttl_ms: int,
        finished: Sequence[Finish] = (),
        checkpoints: Sequence[Checkpoint] = (),
    ) -> Exchanged:
        """Save tokens, post replies and claim up to ``slots`` less what is owned, in this order and in one script.

        ``ack`` is the highest fence received so far: claims above it come (again), so that a lost answer loses nothing.
        ``slots=0`` claims nothing new.
        """
        args: list[str | bytes | int] = [worker, slots, ack, lease_ms, reply_ttl_ms, self._max_payload_bytes]
        args += [len(finished), len(checkpoints)]
        for done in finished:
            args += [done.id, done.fence, done.finish_reason, done.body, *_chunk(done)]
        for saved in checkpoints:
            args += [saved.id, saved.fence, *_chunk(saved)]
        owned, claims, posted, stored = self._run("exchange", [self.keys.own(worker)], args)
        return Exchanged(
            {request_id.decode(): int(float(fence)) for request_id, fence in zip(owned[::2], owned[1::2], strict=True)},
            [_claim(*claim) for claim in claims],
            posted,
            stored,
        )

    def renew(self, worker: str, held: Sequence[tuple[str, int]], *, lease_ms: int, status: bytes) -> list[Lost]:
        """Extend the leases of ``held``, be the worker's heartbeat with its status (JSON), and return what it lost."""
        lost = self._run("renew", [], [worker, lease_ms, status, *_flat(held)])
        return [
            Lost(request_id.decode(), int(fence), why.decode())
            for request_id, fence, why in zip(lost[::3], lost[1::3], lost[2::3], strict=True)
        ]

    def reclaim(self, *, limit: int, lease_ms: int, reply_ttl_ms: int) -> int:
        """Take back up to ``limit`` requests whose lease has lapsed; -1 says that the broker was away and
        all leases were extended."""
        return int(self._run("reclaim", [], [limit, lease_ms, reply_ttl_ms]))

    def release(
        self, worker: str, held: Sequence[tuple[str, int]], *, reply_ttl_ms: int = DEFAULTS.reply_ttl_ms
    ) -> int:
        """Hand back what a leaving worker holds, and forget the worker; returns how many requests went back."""
        return int(self._run("release", [], [worker, reply_ttl_ms, *_flat(held)]))

    def register(self, worker: str, fingerprint: str, *, lease_ms: int) -> str:
        """Tell the queue which model a worker runs; returns the one that the queue has: if it is another one, the
        worker must not serve the queue. Only a queue in which nothing waits, runs or works changes its model."""
        return str(self._run("register", [], [worker, fingerprint, lease_ms]).decode())

    def set_limits(self, max_depth: int | None = None, max_queued_tokens: int | None = None) -> None:
        """Bound what waits, for all producers of the queue; 0 is no limit, None leaves the one that is set. Bare pushes
        are never refused."""
        limits = {"max_depth": max_depth, "max_queued_tokens": max_queued_tokens}
        self._run("configure", [], _flat([(name, limit or "") for name, limit in limits.items() if limit is not None]))

    def suspend(self) -> None:
        """Let workers begin nothing more; what runs goes on, and requests are still accepted."""
        self._run("configure", [], ["suspended", 1])

    def resume(self) -> None:
        """End what ``suspend`` began."""
        self._run("configure", [], ["suspended", ""])

    def empty(self, *, reply_ttl_ms: int = DEFAULTS.reply_ttl_ms) -> int:
        """End all waiting requests as cancelled, each with its reply; returns how many."""
        total, taken = 0, _EMPTY_LIMIT
        while taken == _EMPTY_LIMIT:
            taken, ended = self._run("empty", [], [_EMPTY_LIMIT, reply_ttl_ms, self._max_payload_bytes])
            total += ended
        return total

    def peek(self, timeout_s: float) -> bool:
        """Wait for work without taking any: True once something waits, which another worker may get all the same.

        A bare push of high or low priority ends no wait: it is seen when the time is up.
        """
        with self._errors():
            if self._head(self.keys.requests, timeout_s) is not None:
                return True
            return bool(self._redis.exists(self.keys.resume, self.keys.suspects, self.keys.high, self.keys.low))

    def wait_reply(self, request_id: str, timeout_s: float) -> bytes | None:
        """Wait for the terminal reply (JSON); None if it does not come in time. Any number of readers get it."""
        deadline = time.monotonic() + timeout_s
        with self._errors():
            while True:
                left = deadline - time.monotonic()
                reply = self._head(self.keys.reply(request_id), left)
                if reply is not None or left <= 0:
                    return reply

    def state(self, request_id: str) -> str | None:
        """Waiting, running or the finish reason; None: forgotten, or a bare push that nobody has opened."""
        return self._send(calls.state(self.keys, request_id))

    def read_replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """The terminal replies that are there now, in one round trip and without taking them."""
        with self._errors():
            look = self._redis.pipeline(transaction=False)
            for request_id in request_ids:
                look.lindex(self.keys.reply(request_id), 0)
            return look.execute()

    def read_tokens(self, request_id: str, after: str = "0", block_ms: int = 0) -> list[TokenEntry]:
        """Entries of a token stream after the entry ``after``; waits up to ``block_ms`` (2 s at most) for the first."""
        key = self.keys.tokens(request_id)
        block = min(block_ms, int(LONGEST_BLOCK_S * 1000)) or None  # to Redis 0 is for ever
        with self._errors():
            streams: Any = self._redis.xread({key: after}, block=block)
        return [token_entry(entry_id, fields) for _, entries in streams for entry_id, fields in entries]

    def dead_letters(self, *, count: int = 100, after: str | None = None) -> list[DeadLetter]:
        """Dead letters from the oldest on, or from the one after the entry ``after``."""
        with self._errors():
            entries: Any = self._redis.xrange(self.keys.dead, f"({after}" if after else "-", "+", count)
        return [_dead_letter(*entry) for entry in entries]

    def dead_letter(self, entry_id: str) -> DeadLetter | None:
        """One dead letter, if it is (still) there."""
        with self._errors():
            entries: Any = self._redis.xrange(self.keys.dead, entry_id, entry_id)
        return _dead_letter(*entries[0]) if entries else None

    def requeue_dead(self, entry_id: str) -> str:
        """Send a dead letter again, as a new life of its id: ``ok``, ``gone``, ``cut`` (it was too large to be kept
        whole) or ``in use`` (the id waits or runs)."""
        return str(self._run("requeue", [], [entry_id]).decode())

    def drop_dead(self, entry_id: str | None = None) -> int:
        """Forget one dead letter, or all; returns how many."""
        with self._errors():
            if entry_id is None:
                return self._redis.xtrim(self.keys.dead, maxlen=0, approximate=False)
            return self._redis.xdel(self.keys.dead, entry_id)

    def info(self) -> QueueInfo:
        """Counts, workers and counters; what it shows may have changed between two of its looks."""
        with self._errors():
            return read_info(self._redis, self.keys)


def _chunk(part: Finish | Checkpoint) -> tuple[int, int, str, str]:
    return part.start, len(part.token_ids), ",".join(map(str, part.token_ids)), part.text


def _flat(pairs: Sequence[tuple[str, str | int]]) -> list[str | int]:
    return [part for pair in pairs for part in pair]


def _claim(
    request_id: bytes, fence: int, payload: bytes, deliveries: int, queue_ms: int, age_ms: int, ids: bytes, text: bytes
) -> Claim:
    return Claim(request_id.decode(), fence, payload, deliveries, queue_ms, age_ms, token_ids(ids), text.decode())


def _dead_letter(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    request_id, size = fields[b"id"].decode(), int(fields[b"size"])
    return DeadLetter(entry_id.decode(), fields[b"why"].decode(), request_id, fields[b"payload"], size)
