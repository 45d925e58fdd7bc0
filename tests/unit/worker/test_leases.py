"""Renewals, what they tell, and what ends a worker whose model hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tokenmill.shared.broker import Lost
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.worker.leases import EXIT_STALLED, Leases, Pulse

DEADLINE_S = 5.0


class FakeBroker:
    def __init__(self) -> None:
        self.renewals: list[tuple[list[tuple[str, int]], bytes]] = []
        self.reclaims = 0
        self.lost: list[Lost] = []
        self.failures = 0

    def renew(self, worker: str, held: list[tuple[str, int]], *, lease_ms: int, status: bytes) -> list[Lost]:
        if self.renewals and self.failures > 0:
            self.failures -= 1
            raise BrokerUnreachableError("away")
        self.renewals.append((held, status))
        lost, self.lost = self.lost, []
        return lost

    def reclaim(self, **_: Any) -> int:
        self.reclaims += 1
        return 0


def leases(broker: FakeBroker, pulse: Pulse | None = None, **options: Any) -> Leases:
    return Leases(
        broker,  # type: ignore[arg-type]
        "w",
        owned=lambda: {"a": 5},
        status=lambda: b"{}",
        pulse=pulse or Pulse(),
        lease_ms=20,
        reply_ttl_ms=1000,
        stall_timeout_s=60,
        **options,
    )


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


def test_what_is_owned_is_renewed_with_the_status_and_others_are_reclaimed() -> None:
    broker = FakeBroker()
    subject = leases(broker)
    subject.start()
    wait_for(lambda: len(broker.renewals) >= 3)
    subject.stop()
    assert broker.renewals[0] == ([("a", 5)], b"{}")
    assert broker.reclaims >= 2


def test_what_was_lost_is_told_once() -> None:
    broker = FakeBroker()
    broker.lost = [Lost("a", 5, "fenced")]
    subject = leases(broker)
    subject.start()
    assert subject.take_lost() == [Lost("a", 5, "fenced")]
    assert subject.take_lost() == []
    subject.stop()


def test_renewing_goes_on_after_an_outage() -> None:
    broker = FakeBroker()
    broker.failures = 2
    subject = leases(broker)
    subject.start()
    wait_for(lambda: len(broker.renewals) >= 3)
    subject.stop()


def test_a_step_that_never_ends_stops_the_renewals_and_the_process() -> None:
    now = [0.0]
    exits: list[int] = []
    pulse = Pulse(lambda: now[0])
    broker = FakeBroker()
    subject = leases(broker, pulse, exit_process=exits.append)
    with pulse:
        subject.start()
        now[0] = 61.0
        wait_for(lambda: exits)
    assert exits == [EXIT_STALLED]
    subject.stop()


def test_a_long_idle_time_is_no_stall() -> None:
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    with pulse:
        now[0] = 50.0
        assert pulse.age_s == 50.0
    now[0] = 1000.0
    assert pulse.age_s == 0.0


HOLDS_THE_LOCK = """
import ctypes, threading
from tokenmill.worker import leases
leases.WATCHDOG_MARGIN_S = 0.2
class Broker:
    def renew(self, *args, **kwargs): return []
    def reclaim(self, **kwargs): return 0
pulse = leases.Pulse()
options = dict(lease_ms=100, reply_ttl_ms=1, stall_timeout_s=0.2)
subject = leases.Leases(Broker(), "w", owned=dict, status=bytes, pulse=pulse, **options)
subject.start()
with pulse:
    threading.Event().wait(0.1)
    ctypes.PyDLL(None).sleep(60)  # a call that keeps the interpreter lock
"""


def test_a_step_that_holds_the_interpreter_lock_is_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS_THE_LOCK], capture_output=True, text=True, timeout=20)
    assert done.returncode == EXIT_STALLED
    assert "Timeout" in done.stderr
