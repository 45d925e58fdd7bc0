"""The leases of one worker: renewed from a thread for as long as its loop makes progress."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO

from tokenmill.shared.broker import Lost
from tokenmill.shared.errors import BrokerUnreachableError

log = logging.getLogger(__name__)

EXIT_STALLED = 1
RECLAIM_LIMIT = 100  # expired leases that one call moves: it keeps the script short
WATCHDOG_MARGIN_S = 5.0  # what the watchdog leaves the thread to say it in one line


class Pulse:
    """How long the step that runs now has been running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: float | None = None

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *_: object) -> None:
        self._started = None

    @property
    def age_s(self) -> float:
        """Seconds since the step began; 0 between steps."""
        started = self._started
        return 0.0 if started is None else self._clock() - started


class Lessor(Protocol):
    """Whoever grants the leases: our broker, or RQ's registries."""

    def renew(self, worker: str, held: Sequence[tuple[str, int]], *, lease_ms: int, status: bytes) -> list[Lost]:
        """Extend the leases of ``held``, be the worker's heartbeat, and return what it lost."""

    def reclaim(self, *, limit: int, lease_ms: int, reply_ttl_ms: int) -> int:
        """Take back what others let expire."""


class Leases:
    """Renews what the worker owns, hears what it lost, and reclaims what others let expire.

    When a step does not end within ``stall_timeout_s`` the process exits, which leaves its requests to the others. A
    step that holds the interpreter lock stops this thread too: faulthandler's watchdog, which needs no lock, then ends
    the process.
    """

    def __init__(
        self,
        broker: Lessor,
        worker: str,
        *,
        owned: Callable[[], Mapping[str, int]],
        status: Callable[[], bytes],
        pulse: Pulse,
        lease_ms: int,
        reply_ttl_ms: int,
        stall_timeout_s: float,
        exit_process: Callable[[int], None] = os._exit,
        watchdog_output: TextIO = sys.stderr,
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._owned = owned
        self._status = status
        self._pulse = pulse
        self._lease_ms = lease_ms
        self._reply_ttl_ms = reply_ttl_ms
        self._stall_timeout_s = stall_timeout_s
        self._exit_process = exit_process
        self._watchdog_output = watchdog_output
        self._interval_s = min(lease_ms / 4000, 1.0)
        self._renewed_at = time.monotonic()
        self._lost: list[Lost] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Register the worker and keep its leases from now on; raises BrokerUnreachableError."""
        self.renew()
        self._thread.start()

    def stop(self) -> None:
        """Renew no more."""
        self._stopping.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    @property
    def silence_s(self) -> float:
        """Seconds since the broker answered a renewal."""
        return time.monotonic() - self._renewed_at

    def take_lost(self) -> list[Lost]:
        """What the broker took away since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def renew(self) -> None:
        """Renew once, and reclaim what expired anywhere in the queue."""
        held = list(self._owned().items())
        lost = self._broker.renew(self._worker, held, lease_ms=self._lease_ms, status=self._status())
        self._renewed_at = time.monotonic()
        with self._lock:
            self._lost += lost
        self._broker.reclaim(limit=RECLAIM_LIMIT, lease_ms=self._lease_ms, reply_ttl_ms=self._reply_ttl_ms)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            if self._pulse.age_s > self._stall_timeout_s:
                self._give_up()
                return
            faulthandler.dump_traceback_later(
                self._stall_timeout_s + WATCHDOG_MARGIN_S, exit=True, file=self._watchdog_output
            )
            try:
                self.renew()
            except BrokerUnreachableError:
                pass  # the exchange says so; a lease that expires meanwhile is told as lost
            except Exception:
                log.exception("renewing the leases failed; trying again")

    def _give_up(self) -> None:
        log.error(
            "the model has not finished a step for %.0f s (stall timeout): leaving %d requests to other workers",
            self._pulse.age_s,
            len(self._owned()),
        )
        self._exit_process(EXIT_STALLED)
