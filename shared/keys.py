"""Every Redis key of a queue, built in one place; all of them share the hash tag ``{queue}``, so one cluster slot."""

from __future__ import annotations

import re

from tokenmill.shared.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it may stand in a key, else raise UsageError; ``kind`` says what is named."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{kind} {name[:140]!r} is not valid: use 1 to 128 of A-Z a-z 0-9 _ . : -")
    return name


class Keys:
    """The keys of one queue, ``tm:{queue}:…``."""

    def __init__(self, queue: str) -> None:
        self.queue = check_name("queue name", queue)
        self._prefix = f"tm:{{{queue}}}:"
        self.high = self._prefix + "requests:high"  # list: waiting requests, the whole JSON
        self.requests = self._prefix + "requests"  # list: the same, of normal priority; may begin with a poke, `~`
        self.low = self._prefix + "requests:low"  # list: the same
        self.resume = self._prefix + "resume"  # list: ids of requests begun before, taken first
        self.suspects = self._prefix + "suspects"  # list: ids of requests to be run alone
        self.leases = self._prefix + "leases"  # zset: id → when its lease lapses
        self.deadlines = self._prefix + "deadlines"  # zset: id → when it is due
        self.workers = self._prefix + "workers"  # zset: name → last heartbeat
        self.solo = self._prefix + "solo"  # string: the worker that empties itself for a suspect
        self.dead = self._prefix + "dead"  # stream: dead letters
        self.stats = self._prefix + "stats"  # hash: counters
        self.meta = self._prefix + "meta"  # hash: layout version, model, settings, last fence
        self.shared = (
            *(self.meta, self.stats, self.dead),
            *(self.high, self.requests, self.low, self.resume, self.suspects),
            *(self.leases, self.deadlines, self.workers, self.solo),
        )
        """KEYS[1..12] of every script."""

    def request(self, request_id: str) -> str:
        """Hash: the state of one request."""
        return f"{self._prefix}request:{request_id}"

    def reply(self, request_id: str) -> str:
        """List: the one terminal reply."""
        return f"{self._prefix}reply:{request_id}"

    def tokens(self, request_id: str) -> str:
        """Stream: output tokens so far, live stream and checkpoint in one."""
        return f"{self._prefix}tokens:{request_id}"

    def replies(self, name: str) -> str:
        """Stream: ids of requests that have ended and asked for it by ``reply_to``."""
        return f"{self._prefix}replies:{check_name('reply_to', name)}"

    def idem(self, key: str) -> str:
        """String: which request an idempotency key stands for."""
        return f"{self._prefix}idem:{key}"

    def job(self, job_id: str) -> str:
        """String: the requests of one job of the gateway (JSON)."""
        return f"{self._prefix}job:{job_id}"

    def batch(self, batch_id: str) -> str:
        """Hash: the state of a batch of requests."""
        return f"{self._prefix}batch:{batch_id}"

    def batches(self, caller: str) -> str:
        """Zset: ids of a caller's batches → when they were made."""
        return f"{self._prefix}batches:{caller}"

    def own(self, worker: str) -> str:
        """Zset: id → fence of what a worker owns."""
        return f"{self._prefix}own:{worker}"

    def worker(self, worker: str) -> str:
        """String: what a worker last said about itself (JSON)."""
        return f"{self._prefix}worker:{worker}"
