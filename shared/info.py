"""A look at a queue: counts, workers, counters."""

from __future__ import annotations

from typing import Any

import msgspec
import redis

from tokenmill.shared.keys import Keys
from tokenmill.shared.records import QueueInfo, WorkerInfo

_POKE = b"~"


class _PushedId(msgspec.Struct):
    id: str


def read_info(client: redis.Redis, keys: Keys) -> QueueInfo:
    """The queue at a glance, in two round trips."""
    depths, (now_ms, meta, stats), heads, (running, dead, heartbeats) = _first_look(client, keys)
    resumed, first, high, low = heads
    pokes = first[:1].count(_POKE)
    next_id = resumed.decode() if resumed else _pushed_id(high or (first[pokes:] or [low])[0])
    enqueued, workers = _second_look(client, keys, next_id, heartbeats, now_ms)
    model = meta.get(b"model")
    return QueueInfo(
        waiting=sum(depths) - pokes - int(meta.get(b"husks", 0)),
        resume=depths[3],
        running=running,
        oldest_age_ms=now_ms - int(enqueued) if enqueued else None,
        workers=workers,
        stats={name.decode(): int(value) for name, value in stats.items()},
        high=depths[0],
        normal=depths[1] - pokes,
        low=depths[2],
        suspects=depths[4],
        dead=dead,
        suspended=b"suspended" in meta,
        model=model.decode() if model else None,
        queued_tokens=int(meta.get(b"queued_tokens", 0)),
        max_queued_tokens=int(meta.get(b"max_queued_tokens", 0)),
        max_depth=int(meta.get(b"max_depth", 0)),
    )


def _first_look(client: redis.Redis, keys: Keys) -> tuple[list[int], Any, Any, Any]:
    """Depths of the lists, the queue's hashes, the heads of the lists, and the rest."""
    look: Any = client.pipeline(transaction=False)
    for key in (keys.high, keys.requests, keys.low, keys.resume, keys.suspects):
        look.llen(key)
    look.time().hgetall(keys.meta).hgetall(keys.stats)
    look.lindex(keys.resume, 0).lrange(keys.requests, 0, 1).lindex(keys.high, 0).lindex(keys.low, 0)
    look.zcard(keys.leases).xlen(keys.dead).zrange(keys.workers, 0, -1, withscores=True)
    answers = look.execute()
    seconds, micros = answers[5]
    return answers[:5], (seconds * 1000 + micros // 1000, *answers[6:8]), answers[8:12], answers[12:]


def _second_look(
    client: redis.Redis, keys: Keys, next_id: str, heartbeats: list[tuple[bytes, float]], now_ms: int
) -> tuple[bytes | None, list[WorkerInfo]]:
    """When the next request in line was enqueued, and the workers."""
    look: Any = client.pipeline(transaction=False)
    look.hget(keys.request(next_id), "enqueued")
    for name, _ in heartbeats:
        look.zcard(keys.own(name.decode())).get(keys.worker(name.decode()))
    enqueued, *reports = look.execute()
    workers = [
        WorkerInfo(name.decode(), now_ms - int(seen), busy, msgspec.json.decode(status or b"{}"))
        for (name, seen), busy, status in zip(heartbeats, reports[::2], reports[1::2], strict=True)
    ]
    return enqueued, workers


def _pushed_id(payload: bytes | None) -> str:
    """The id in a waiting payload; an empty one, which no request has, where there is none to read."""
    try:
        return msgspec.json.decode(payload or b"", type=_PushedId).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
