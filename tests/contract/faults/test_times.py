"""Equal times, and ids that come back: no clock tells things apart, and no life of an id reaches into the next."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, Checkpoint, connect

from ...waiting import eventually
from ..broker.driver import LEASE_MS, TTL_MS, Worker, body, done

SWEEP = {"limit": 7, "lease_ms": LEASE_MS, "reply_ttl_ms": TTL_MS}


def test_requests_claimed_in_one_microsecond_have_different_fences(broker: Broker) -> None:
    for number in range(20):
        broker.enqueue(f"r{number}", body(f"r{number}"))
    claims = [claim for name in ("v", "w") for claim in Worker(broker, name, slots=10).claim()]
    fences = [claim.fence for claim in claims]
    assert [claim.id for claim in claims] == [f"r{number}" for number in range(20)]
    assert fences == sorted(set(fences))


def test_leases_that_lapse_in_one_millisecond_are_taken_back_once_each(broker: Broker, client: Any) -> None:
    for number in range(20):
        broker.enqueue(f"r{number:02}", body(f"r{number:02}"))
    claims = Worker(broker, "dead", slots=20).claim()
    client.zadd(broker.keys.leases, {claim.id: 1 for claim in claims})
    assert [broker.reclaim(**SWEEP) for _ in range(4)] == [7, 7, 6, 0]
    again = Worker(broker, "heir", slots=20).claim()
    assert [claim.id for claim in again] == [claim.id for claim in claims]
    assert {claim.deliveries for claim in again} == {2}


def test_deadlines_in_one_millisecond_get_one_reply_each(broker: Broker, client: Any) -> None:
    names = [f"r{number:02}" for number in range(20)]
    for name in names:
        broker.enqueue(name, body(name), timeout_ms=1000)
    for name in names:
        client.hset(broker.keys.request(name), "due", 1)
        client.zadd(broker.keys.deadlines, {name: 1})
    assert [broker.reclaim(**SWEEP) for _ in range(4)] == [7, 7, 6, 0]
    assert [client.llen(broker.keys.reply(name)) for name in names] == [1] * 20


def test_an_id_resubmitted_within_retention_is_its_cancelled_first_life(broker: Broker) -> None:
    broker.enqueue("a", body("a"))
    broker.cancel("a")
    first = broker.wait_reply("a", 0)
    assert broker.enqueue("a", body("a"))[:2] == ("duplicate", "cancelled")
    assert Worker(broker).claim() == []
    assert broker.wait_reply("a", 0) == first


@pytest.mark.parametrize("end", ["cancelled", "finished"])
def test_an_id_resubmitted_after_retention_is_out_of_reach_for_its_first_life(
    end: str, broker: Broker, client: Any
) -> None:
    broker.enqueue("a", body("a"))
    zombie = Worker(broker, "zombie")
    old = zombie.claim_one()
    if end == "cancelled":
        assert broker.cancel("a") == "signalled"
    zombie.exchange(done(old, "cancelled" if end == "cancelled" else "stop"), slots=0)
    client.delete(broker.keys.request("a"), broker.keys.reply("a"))  # as their expiry does

    assert broker.enqueue("a", body("a")).status == "ok"
    new = Worker(broker, "new").claim_one()
    assert new.fence > old.fence
    late = zombie.exchange(done(old), checkpoints=[Checkpoint("a", old.fence, 0, [1], "x")], slots=0)
    assert (late.finished, late.checkpoints, late.owned) == ([0], [0], {})
    assert [lost.why for lost in broker.renew("zombie", [("a", old.fence)], lease_ms=LEASE_MS, status=b"{}")] == [
        "fenced"
    ]
    assert broker.renew("new", [("a", new.fence)], lease_ms=LEASE_MS, status=b"{}") == []
    assert Worker(broker, "new", ack=new.fence).finish(new) == 1
    assert broker.wait_reply("a", 0) == f"a {new.fence}".encode()


def test_a_reader_gets_the_reply_before_during_after_and_twice_but_not_too_late(
    broker: Broker, client: Any, fault_url: str
) -> None:
    broker.enqueue("a", body("a"))
    claim = Worker(broker).claim_one()
    assert broker.wait_reply("a", 0) is None  # before
    got: list[bytes | None] = []

    def read() -> None:
        with connect(fault_url) as other:
            got.append(Broker(other, broker.keys.queue).wait_reply("a", 10))

    during = threading.Thread(target=read)
    during.start()
    Worker(broker, ack=claim.fence).finish(claim)
    during.join()
    expected = f"a {claim.fence}".encode()
    assert [*got, broker.wait_reply("a", 1), broker.wait_reply("a", 0)] == [expected] * 3  # during, after, twice
    client.pexpire(broker.keys.reply("a"), 1)
    eventually(lambda: broker.wait_reply("a", 0) is None)
    assert broker.wait_reply("a", 0.01) is None  # too late
    assert broker.enqueue("a", body("a"))[:2] == ("duplicate", "stop")  # and it can be told so
