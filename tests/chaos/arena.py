"""What a disturbance can get at."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from tokenmill.shared.broker import Broker

from .config import Config
from .ledger import Ledger
from .proxy import Proxy
from .server import Server
from .workers import Workers

Action = Callable[[], object]


@dataclass(slots=True)
class Arena:
    """One run in progress; only the director's thread touches it."""

    config: Config
    server: Server
    proxy: Proxy
    workers: Workers
    ledger: Ledger
    direct: redis.Redis  # past the proxy
    broker: Broker  # over ``direct``
    rng: random.Random
    clock: Callable[[], float] = time.monotonic
    _later: list[tuple[float, int, Action]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def lease_s(self) -> float:
        return self.config.lease_ms / 1000

    def next_number(self) -> int:
        """A number that this run has not used."""
        return next(self._numbers)

    def later(self, delay_s: float, action: Action) -> None:
        """Have something done after a while: the end of what was begun now."""
        heapq.heappush(self._later, (self.clock() + delay_s, self.next_number(), action))

    def do_what_is_due(self) -> None:
        """Do what was put off until now."""
        while self._later and self._later[0][0] <= self.clock():
            heapq.heappop(self._later)[2]()

    @property
    def quiet(self) -> bool:
        """Whether nothing is put off any more."""
        return not self._later
