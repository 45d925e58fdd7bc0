"""``--max-wait-ms``: requests that come one by one start together, and waiting for others costs the broker nothing."""

from __future__ import annotations

import time
from typing import Any

from tokenmill.shared.broker import connect

from .workplace import DEADLINE_S, Workplace, wait_for

WAIT_MS = 1000
SLOTS = 3


def held(workplace: Workplace) -> bool:
    return workplace.broker.info().running == 1


def exchanges(workplace: Workplace) -> int:
    """Scripts that the broker has run."""
    commands: Any = connect(workplace.url).info("commandstats")
    return int(commands["cmdstat_evalsha"]["calls"])


def test_requests_wait_for_a_fuller_batch_and_start_together(workplace: Workplace) -> None:
    workplace.start("toy", "--slots", str(SLOTS), "--max-wait-ms", str(WAIT_MS))
    first = workplace.client.submit("a", max_tokens=4, ignore_eos=True)
    wait_for(lambda: held(workplace))
    second = workplace.client.submit("b", max_tokens=4, ignore_eos=True)
    early, late = (workplace.client.wait(request_id, DEADLINE_S) for request_id in (first, second))
    assert early.ttft_ms is not None
    assert late.ttft_ms is not None
    assert early.ttft_ms >= WAIT_MS
    assert late.ttft_ms < early.ttft_ms  # the oldest decides when all of them start
    wait_for(lambda: workplace.broker.info().workers[0].status["requests"] == 2)
    status = workplace.broker.info().workers[0].status
    assert status["row_steps"] == 2 * status["steps"]  # every step had both


def test_requests_that_fill_the_slots_start_at_once(workplace: Workplace) -> None:
    workplace.start("toy", "--slots", str(SLOTS), "--max-wait-ms", "60000")
    replies = list(workplace.client.map(["a", "b", "c"], max_tokens=4))
    assert all(reply.e2e_ms is not None and reply.e2e_ms < 10_000 for reply in replies)


def test_a_drain_does_not_wait_for_others(workplace: Workplace) -> None:
    worker = workplace.start("toy", "--slots", str(SLOTS), "--max-wait-ms", "60000")
    request_id = workplace.client.submit("a", max_tokens=4)
    wait_for(lambda: held(workplace))
    worker.terminate()
    assert workplace.client.wait(request_id, DEADLINE_S).finish_reason in ("stop", "length")
    assert worker.wait(DEADLINE_S) == 0


def test_a_worker_that_only_holds_requests_waits_at_the_broker_for_more(workplace: Workplace) -> None:
    workplace.start("toy", "--slots", str(SLOTS), "--max-wait-ms", str(WAIT_MS))
    request_id = workplace.client.submit("a", max_tokens=4)
    wait_for(lambda: held(workplace))
    before, began = exchanges(workplace), time.monotonic()
    reply = workplace.client.wait(request_id, DEADLINE_S)
    asked = exchanges(workplace) - before
    assert reply.ttft_ms is not None
    assert reply.ttft_ms >= WAIT_MS
    assert asked < 20 + 20 * (time.monotonic() - began)  # it renews and reclaims every 150 ms
