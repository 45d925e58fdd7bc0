"""A broker that goes away for a while: every call may be repeated, so producers try again until one works."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenmill.shared.errors import BrokerUnreachableError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between two tries; it doubles

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Outage:
    """When to try again, with one warning when the broker goes away and one when it is back.

    A broker that never answered is a mistake to be told at once, not an outage.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reached = False
        self._since: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self.error: BrokerUnreachableError | None = None
        """What the broker's absence looks like, while it lasts."""

    def pause_s(self, error: BrokerUnreachableError) -> float:
        """Seconds to wait after this error before the next try; raises the error if no call ever worked."""
        if not self._reached:
            raise error
        self.error = error
        if self._since is None:
            self._since = self._clock()
            self._pause_s = FIRST_PAUSE_S
            _logger.warning("%s; trying again until it is back", error)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def over(self, began: float = math.inf) -> None:
        """A call has worked. One that began before the broker went away may only have had its answer already."""
        self._reached = True
        if self._since is not None and began >= self._since:
            _logger.warning("the broker is back after %.1f s", self._clock() - self._since)
            self._since = self.error = None

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """What the call returns, tried again for as long as the broker is away."""
        while True:
            began = self._clock()
            try:
                answer = await call()
            except BrokerUnreachableError as error:
                await asyncio.sleep(self.pause_s(error))
            else:
                self.over(began)
                return answer
