"""The plan of a run: what is asked and what goes wrong, all drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from .config import Config
from .disturbances import DISTURBANCES
from .workload import GoodRequest, draw_requests


class Planned(NamedTuple):
    """A disturbance, when ``at`` (0 to 1) of the requests have been sent."""

    at: float
    name: str
    seed: int


class Plan(NamedTuple):
    requests: list[GoodRequest]
    strikes: list[Planned]  # in the order of ``at``


def draw_plan(config: Config) -> Plan:
    """The plan of a run: the same for the same config, though what comes of it depends on the machine."""
    rng = random.Random(config.seed)
    requests = draw_requests(rng, config.requests, plain=config.control, streams=config.streams)
    strikes = [
        Planned(rng.random(), name, rng.randrange(2**32))
        for name, count in config.strikes.items()
        for _ in range(count)
    ]
    return Plan(requests, sorted(strikes))


def usual_strikes(duration_s: float, counts: Mapping[str, int] | None = None) -> dict[str, int]:
    """How often each disturbance comes in so many seconds; ``counts`` names those that are wanted otherwise."""
    usual = {name: round(it.per_minute * duration_s / 60) for name, it in DISTURBANCES.items()}
    return {**usual, **(counts or {})}
