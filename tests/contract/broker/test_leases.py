"""Leases, heartbeats, and what happens to a worker's requests when it falls silent or leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.shared.broker import Broker, Lost

from .driver import LEASE_MS, Worker, body


def test_a_renewed_lease_does_not_lapse(
    broker: Broker, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    lapse()

    assert broker.renew("w", [("a", claim.fence)], lease_ms=LEASE_MS, status=b"{}") == []
    assert reclaim() == 0


def test_a_worker_that_lost_a_request_hears_it_from_renew_and_from_exchange(
    broker: Broker, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    lapse()
    reclaim()

    held = [("a", claim.fence), ("never", 1)]
    lost = broker.renew("w", held, lease_ms=LEASE_MS, status=b"{}")
    assert lost == [Lost("a", claim.fence, "fenced"), Lost("never", 1, "fenced")]
    assert worker.exchange(slots=0).owned == {}


def test_reclaimed_requests_keep_their_order_and_go_before_new_ones(
    broker: Broker, make_worker: Callable[..., Worker], lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    for name in ("a", "b", "c", "d"):
        broker.enqueue(name, body(name))
    make_worker("w", slots=3).claim()
    for name in ("c", "b", "a"):
        lapse(name)
        assert reclaim() == 1

    assert [claim.id for claim in make_worker("other").claim()] == ["c", "b", "a", "d"]


def test_reclaim_takes_back_no_more_than_its_limit(
    broker: Broker, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    for i in range(5):
        broker.enqueue(str(i), body(str(i)))
    worker.claim()
    lapse()
    assert [reclaim(limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_nobody_is_blamed_while_the_broker_was_away(
    broker: Broker, client: Any, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    worker.claim_one()
    reclaim()
    client.hincrby(broker.keys.meta, "reclaimed", -LEASE_MS - 1000)
    lapse()

    assert [reclaim(), reclaim()] == [-1, 0]
    lapse()
    assert reclaim() == 1


def test_a_leaving_worker_hands_back_what_it_holds_and_is_forgotten(broker: Broker, worker: Worker) -> None:
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    a, b = worker.claim()
    broker.renew("w", [], lease_ms=LEASE_MS, status=b"{}")

    assert broker.release("w", [(a.id, a.fence), (b.id, b.fence - 1)]) == 1
    assert broker.release("w", [(a.id, a.fence)]) == 0  # again
    info = broker.info()
    assert (info.workers, info.resume, info.running) == ([], 1, 1)


def test_a_silent_worker_is_forgotten_after_three_leases(
    broker: Broker, client: Any, reclaim: Callable[..., int]
) -> None:
    for name in ("silent", "alive"):
        broker.renew(name, [], lease_ms=LEASE_MS, status=b'{"busy": 0}')
    assert 0 < client.pttl(broker.keys.worker("silent")) <= 3 * LEASE_MS
    client.zincrby(broker.keys.workers, -3 * LEASE_MS - 1000, "silent")

    reclaim()

    assert [worker.name for worker in broker.info().workers] == ["alive"]


def test_info_shows_workers_with_what_they_say_of_themselves(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    broker.enqueue("b", body("b"))
    worker.slots = 1
    worker.claim()
    broker.renew("w", [], lease_ms=LEASE_MS, status=b'{"model": "toy", "slots": 1}')

    info = broker.info()

    [shown] = info.workers
    assert (shown.name, shown.busy, shown.status) == ("w", 1, {"model": "toy", "slots": 1})
    assert 0 <= shown.age_ms < LEASE_MS
    assert (info.waiting, info.resume, info.running) == (1, 0, 1)
    assert info.oldest_age_ms is not None
    assert 0 <= info.oldest_age_ms < LEASE_MS
