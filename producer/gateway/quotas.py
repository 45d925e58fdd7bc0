"""How much one caller may ask for, so that it cannot starve the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenmill.producer.gateway.callers import Caller
from tokenmill.producer.gateway.errors import ApiError, RetryLater

_PENDING_RETRY_S = 1.0


class Quotas:
    """Calls a minute, in a bucket of as many tokens, and requests that wait or run; 0 is no limit.

    They are those of one gateway process.
    """

    def __init__(self, *, calls_per_minute: int, max_pending: int, clock: Callable[[], float]) -> None:
        self._calls_per_minute = calls_per_minute
        self._max_pending = max_pending
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when the bucket of a caller will be full again
        self.pending: defaultdict[str, int] = defaultdict(int)

    def count_call(self, caller: Caller) -> None:
        """Take a token from the caller's bucket; raises ApiError 429 when there is none."""
        if not self._calls_per_minute:
            return
        now, seconds = self._clock(), 60 / self._calls_per_minute
        full_at = max(now, self._full_at.get(caller.name, now)) + seconds
        if full_at - now > 60 + 1e-6:
            wait = full_at - now - 60
            what = f"more than {self._calls_per_minute} calls a minute: try again in {math.ceil(wait)} s"
            raise RetryLater(429, what, wait, code="rate_limit_exceeded")
        self._full_at[caller.name] = full_at

    @contextmanager
    def hold(self, caller: Caller, n: int) -> Iterator[None]:
        """Count so many requests as pending meanwhile; raises ApiError 429 when they would be too many."""
        self.take(caller, n)
        try:
            yield
        finally:
            self.give_back(caller, n)

    def take(self, caller: Caller, n: int) -> None:
        """Count so many requests as pending until they are given back."""
        if self._max_pending and n > self._max_pending:
            raise ApiError(400, f"{n} requests in one call are more than the {self._max_pending} that may be pending")
        if self._max_pending and self.pending[caller.name] + n > self._max_pending:
            what = f"more than {self._max_pending} requests of this API key are pending: wait for some of them"
            raise RetryLater(429, what, _PENDING_RETRY_S, code="too_many_pending")
        self.pending[caller.name] += n

    def give_back(self, caller: Caller, n: int) -> None:
        """So many requests have ended."""
        self.pending[caller.name] -= n
        if not self.pending[caller.name]:
            del self.pending[caller.name]
