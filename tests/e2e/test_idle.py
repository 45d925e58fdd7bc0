"""A minute in which nothing happens, in real time: `make test-long`."""

from __future__ import annotations

import threading

import pytest

from .workplace import DEADLINE_S, Workplace

IDLE_S = 60.0


@pytest.mark.long
def test_a_minute_of_silence_costs_neither_the_worker_nor_the_client_its_connection(workplace: Workplace) -> None:
    worker = workplace.start("toy")
    assert workplace.client.generate("before", timeout=DEADLINE_S).error is None
    threading.Event().wait(IDLE_S)
    after = workplace.client.generate("after", timeout=DEADLINE_S)
    assert (after.error, after.deliveries, worker.poll()) == (None, 1, None)
    assert after.e2e_ms is not None
    assert after.e2e_ms < 1000
    assert workplace.registered() == [worker.pid]
