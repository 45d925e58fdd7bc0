"""What a run leaves behind: all that the audit looks at, gathered once the workers have gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.client import Pipeline

from .arena import Arena
from .config import Config
from .ledger import Seen
from .toxic import Toxic
from .workload import GoodRequest

_AT_ONCE = 1000
_BALANCED = ("husks", "queued_tokens")  # fields of meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All of one run; ids are those of requests."""

    config: Config
    accepted: dict[str, GoodRequest]
    cancelled: dict[str, str | None]  # what the broker answered to each cancel
    toxic: list[Toxic]  # pushed for sure
    perhaps_toxic: list[Toxic]  # the broker's answer to the push was lost
    seen: list[Seen]
    replies: dict[str, list[bytes]]  # what lies under each reply key
    posted: Mapping[str, int]  # pushes on each reply key, as the server told them; some are missing
    stats: dict[str, int]
    dead_letters: int
    lasting: list[str]  # keys without expiry, their prefix removed
    unbalanced: list[str]  # counts of what waits that are not 0
    problems: list[str]
    struck: Mapping[str, int]  # disturbances
    network: Mapping[str, int]  # requests that a proxy fault hit
    exits: Mapping[str, int]  # how worker processes ended
    generated: int  # output tokens computed
    took_s: float


def gather(arena: Arena, *, struck: Mapping[str, int], posted: Mapping[str, int], took_s: float) -> Evidence:
    """Read everything that is left."""
    client, keys = arena.direct, arena.broker.keys
    prefix = keys.requests.removesuffix("requests")
    found: Iterator[Any] = client.scan_iter(match="tm:*", count=_AT_ONCE)
    names = [key.decode() for key in found]
    stats: dict[Any, Any] = client.hgetall(keys.stats)
    toxic, perhaps_toxic = arena.ledger.toxic
    workers = arena.workers
    return Evidence(
        config=arena.config,
        accepted=arena.ledger.accepted,
        cancelled=arena.ledger.cancelled,
        toxic=toxic,
        perhaps_toxic=perhaps_toxic,
        seen=arena.ledger.seen,
        replies=dict(_replies(client, keys.reply(""), names)),
        posted=dict(posted),
        stats={name.decode(): int(value) for name, value in stats.items()},
        dead_letters=client.xlen(keys.dead),
        lasting=sorted(name.removeprefix(prefix) for name in _lasting(client, names)),
        unbalanced=[name for name in _BALANCED if int(client.hget(keys.meta, name) or 0)],
        problems=arena.ledger.problems + workers.problems + workers.tracebacks(),
        struck=dict(struck),
        network=Counter(arena.proxy.hits),
        exits=dict(workers.exits),
        generated=workers.tokens_generated(),
        took_s=took_s,
    )


def _replies(client: redis.Redis, prefix: str, names: list[str]) -> Iterator[tuple[str, list[bytes]]]:
    replies = [name for name in names if name.startswith(prefix)]
    for name, bodies in _ask_each(client, replies, lambda pipeline, name: pipeline.lrange(name, 0, -1)):
        yield name.removeprefix(prefix), bodies


def _lasting(client: redis.Redis, names: list[str]) -> Iterator[str]:
    for name, ttl in _ask_each(client, names, lambda pipeline, name: pipeline.ttl(name)):
        if ttl == -1:
            yield name


def _ask_each(
    client: redis.Redis, names: list[str], ask: Callable[[Pipeline, str], object]
) -> Iterator[tuple[str, Any]]:
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        pipeline = client.pipeline(transaction=False)
        for name in some:
            ask(pipeline, name)
        yield from zip(some, pipeline.execute(), strict=True)
