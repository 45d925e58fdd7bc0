"""What the broker keeps of a batch: when it came to each state, and how far each of its chunks is."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import redis

from tokenmill.shared.connection import plain_errors
from tokenmill.shared.keys import Keys

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Moment = Literal[
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"
]

KEPT_S = 30 * 86_400
_ENDINGS: tuple[Moment, ...] = ("completed_at", "failed_at", "expired_at", "cancelled_at")
_ORDER: tuple[Moment, ...] = (
    *_ENDINGS,
    "cancelling_at",
    "finalizing_at",
    "in_progress_at",
)  # the first that is there counts


class Counts(msgspec.Struct, kw_only=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True):
    """What is wrong with a line of the input, or with all of them."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Chunk(msgspec.Struct, kw_only=True, array_like=True):
    """Consecutive lines of the input."""

    offset: int  # bytes before them
    first: int  # number of the first line, from 0
    lines: int


class Batch(msgspec.Struct, kw_only=True):
    """A batch; times in seconds since 1970."""

    id: str
    caller: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    moments: dict[str, int] = {}
    errors: list[BatchError] = []
    chunks: list[Chunk] = []
    counts: Counts = msgspec.field(default_factory=Counts)
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will happen to it."""
        return any(moment in self.moments for moment in _ENDINGS)


class Records:
    """The batches of one queue. Every write may be repeated: a moment is the first at which its state was reached.

    Times are the broker's, so that no clock of any machine can end a batch.
    """

    def __init__(self, client: redis.Redis, keys: Keys, address: str) -> None:
        self._redis = client
        self._keys = keys
        self._address = address

    def now(self) -> int:
        """Seconds since 1970, by the broker's clock."""
        with self._errors():
            seconds, _ = self._redis.time()
        return int(seconds)

    def begin(self, batch: Batch) -> None:
        """Keep a new batch."""
        key, of_caller = self._keys.batch(batch.id), self._keys.batches(batch.caller)
        with self._errors():
            together = self._redis.pipeline()
            together.hset(key, "batch", msgspec.json.encode(batch))
            together.expire(key, KEPT_S)
            together.zadd(of_caller, {batch.id: batch.created_at})
            together.expire(of_caller, KEPT_S)
            together.zremrangebyscore(of_caller, "-inf", batch.created_at - KEPT_S)
            together.execute()

    def find(self, batch_id: str) -> Batch | None:
        """A batch as it is now."""
        with self._errors():
            fields: dict[bytes, bytes] = self._redis.hgetall(self._keys.batch(batch_id))  # type: ignore[assignment]
        if b"batch" not in fields:
            return None
        batch = msgspec.json.decode(fields.pop(b"batch"), type=Batch)
        told: dict[str, Any] = {name.decode(): value for name, value in fields.items()}
        batch.moments = {name: int(value) for name, value in told.items() if name.endswith("_at")}
        batch.errors = msgspec.json.decode(told.get("errors", b"[]"), type=list[BatchError])
        batch.chunks = msgspec.json.decode(told.get("chunks", b"[]"), type=list[Chunk])
        batch.output_file_id, batch.error_file_id = _text(told.get("output")), _text(told.get("error"))
        batch.counts = _counts(told)
        batch.status = _status(batch.moments)
        return batch

    def list(self, caller: str, limit: int, after: str | None = None) -> list[Batch]:
        """Batches of a caller, the newest first, after one of them."""
        with self._errors():
            ids: list[bytes] = self._redis.zrevrange(self._keys.batches(caller), 0, -1)  # type: ignore[assignment]
        names = [name.decode() for name in ids]
        if after in names:
            names = names[names.index(after) + 1 :]
        found = (self.find(name) for name in names)
        return [batch for _, batch in zip(range(limit), (b for b in found if b is not None), strict=False)]

    def reach(self, batch_id: str, moment: Moment, **more: bytes | str) -> None:
        """Note when a state was reached first, and what came with it."""
        key, now = self._keys.batch(batch_id), self.now()
        with self._errors():
            together = self._redis.pipeline()
            if more:
                together.hset(key, items=[part for pair in more.items() for part in pair])
            together.hsetnx(key, moment, str(now))
            together.execute()

    def note(self, batch_id: str, chunk: int, completed: int, failed: int) -> None:
        """How many lines of a chunk are done by now."""
        with self._errors():
            self._redis.hset(self._keys.batch(batch_id), f"done:{chunk}", f"{completed} {failed}")

    def stop_code(self, batch: Batch) -> str | None:
        """Why no more lines are to be begun: ``batch_cancelled``, ``batch_expired``, or None."""
        with self._errors():
            cancelling = self._redis.hexists(self._keys.batch(batch.id), "cancelling_at")
        if cancelling:
            return "batch_cancelled"
        return "batch_expired" if self.now() >= batch.expires_at else None

    def _errors(self) -> Any:
        return plain_errors(self._address, self._keys.queue)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _counts(told: dict[str, Any]) -> Counts:
    counts = Counts(total=int(told.get("total", 0)))
    for name, value in told.items():
        if name.startswith("done:"):
            completed, failed = map(int, value.split())
            counts.completed += completed
            counts.failed += failed
    return counts


def _status(moments: dict[str, int]) -> Status:
    reached = next((moment for moment in _ORDER if moment in moments), None)
    return "validating" if reached is None else reached.removesuffix("_at")  # type: ignore[return-value]
