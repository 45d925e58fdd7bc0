"""The meters of the broker benchmark: time, processor time of worker and broker, and the broker's own counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.machine import process_cpu_s
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cost:
    """What serving took; all but the rate per request."""

    rate: float  # requests per second
    worker_us: float  # processor time of the worker; NaN where the system does not tell
    broker_us: float  # processor time of the broker
    script_us: float  # of it inside scripts, by the broker's own count
    round_trips: float
    commands: float  # that scripts ran


@dataclass(frozen=True, slots=True)
class Moment:
    """The meters at one moment."""

    seconds: float
    answered: int
    worker_cpu_s: float
    broker_cpu_s: float
    script_us: float
    round_trips: int
    commands: int

    @classmethod
    def now(cls, broker: Broker, client: redis.Redis, pid: int) -> Moment:
        """Read all meters."""
        stats: dict[str, Any] = client.info("commandstats")
        script = stats.get("cmdstat_evalsha", {"calls": 0, "usec": 0})
        sent = script["calls"] + stats.get("cmdstat_blmove", {"calls": 0})["calls"]
        return cls(
            time.perf_counter(),
            answered(broker, client),
            process_cpu_s(pid),
            broker_cpu_s(client),
            script["usec"],
            sent,
            sum(command["calls"] for command in stats.values()) - sent,
        )

    def since(self, before: Moment) -> Cost:
        """Per request answered meanwhile."""
        n = self.answered - before.answered
        if not n:
            raise UsageError("too few requests to measure: give more with --requests")
        return Cost(
            rate=n / (self.seconds - before.seconds),
            worker_us=(self.worker_cpu_s - before.worker_cpu_s) / n * 1e6,
            broker_us=(self.broker_cpu_s - before.broker_cpu_s) / n * 1e6,
            script_us=(self.script_us - before.script_us) / n,
            round_trips=(self.round_trips - before.round_trips) / n,
            commands=(self.commands - before.commands) / n,
        )


def fresh(url: str) -> redis.Redis:
    """A client of an emptied broker."""
    client = connect(url, socket_timeout_s=60.0)
    client.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]  # later, freed memory would count as ours
    return client


def used(client: redis.Redis) -> int:
    """Bytes of memory in use by the broker."""
    return int(client.info("memory")["used_memory"])


def broker_cpu_s(client: redis.Redis) -> float:
    """Processor seconds of the broker."""
    cpu: dict[str, Any] = client.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def answered(broker: Broker, client: redis.Redis) -> int:
    """Requests that ended as they should."""
    return int(client.hget(broker.keys.stats, "finished_length") or 0)
