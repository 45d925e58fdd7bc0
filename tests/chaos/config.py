"""What one chaos run is: how much, how long, against whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run; the plan that is drawn from ``seed`` depends on nothing else but the fields here."""

    seed: int = 1
    duration_s: float = 120.0  # the requests are spread over it; a slow machine takes longer
    requests: int = 2000
    strikes: dict[str, int] = field(default_factory=dict)  # disturbance → how often
    workers: int = 4
    slots: int = 8
    lease_ms: int = 1000
    checkpoint_tokens: int = 16
    delay_ms: float = 15.0  # of one step of the toy model
    streams: float = 0.12  # share of the requests that stream, each with a reader
    fsync: Literal["always", "everysec"] = "always"
    server: Path | None = None  # a Redis or Valkey binary; None: the one of the embedded broker
    control: bool = False  # plain BLPOP workers instead of ours
    window: int = 120  # accepted and unanswered requests at which producers wait
    settle_s: float = 60.0  # how long the last replies may take once all is calm
    limit_s: float | None = None  # how long the whole run may take; None: three times the duration and a minute
    queue: str = "chaos"
