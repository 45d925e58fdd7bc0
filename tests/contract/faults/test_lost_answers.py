"""One answer is lost on its way: the call is repeated, and nothing happens twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, Checkpoint
from tokenmill.shared.errors import BrokerUnreachableError

from ...chaos.proxy import Fault, Proxy
from ...waiting import eventually
from ..broker.driver import LEASE_MS, TTL_MS, Worker, body, done


@pytest.fixture(params=["swallow", "cut", "part", "late"])
def lose(request: pytest.FixtureRequest, proxy: Proxy, far: Broker) -> Callable[[Callable[[], Any]], None]:
    """Make one call whose answer is lost: served or not, wholly, in part, or after it was repeated."""
    fault: Fault = request.param

    def lose(call: Callable[[], Any]) -> None:
        far.info()  # it is connected, and knows its scripts
        proxy.strike(fault, 1.0)
        with pytest.raises(BrokerUnreachableError):
            call()
        eventually(lambda: proxy.hits[fault] == 1)

    return lose


def test_an_answer_lost_after_enqueue(lose: Callable[[Callable[[], Any]], None], far: Broker, client: Any) -> None:
    lose(lambda: far.enqueue("a", body("a")))
    again = far.enqueue("a", body("a"))
    assert again.status in ("ok", "duplicate")
    assert (again.state, client.llen(far.keys.requests)) == ("waiting", 1)


def test_an_answer_lost_after_claim(lose: Callable[[Callable[[], Any]], None], far: Broker, broker: Broker) -> None:
    for name in ("a", "b", "c"):
        broker.enqueue(name, body(name))
    worker = Worker(far, slots=2)
    lose(worker.claim)
    claims = worker.claim()
    assert [(claim.id, claim.deliveries) for claim in claims] == [("a", 1), ("b", 1)]
    assert (broker.info().waiting, broker.info().running) == (1, 2)


def test_an_answer_lost_after_a_checkpoint(
    lose: Callable[[Callable[[], Any]], None], far: Broker, broker: Broker
) -> None:
    broker.enqueue("a", body("a"), stream=True)
    worker = Worker(far)
    fence = worker.claim_one().fence
    lose(lambda: worker.exchange(checkpoints=[Checkpoint("a", fence, 0, [1, 2], "xy")]))
    assert worker.exchange(checkpoints=[Checkpoint("a", fence, 0, [1, 2], "xy")]).checkpoints == [1]
    assert [(entry.start, entry.text) for entry in broker.read_tokens("a")] == [(0, "xy")]


def test_an_answer_lost_after_finish(
    lose: Callable[[Callable[[], Any]], None], far: Broker, broker: Broker, client: Any
) -> None:
    broker.enqueue("a", body("a"))
    worker = Worker(far)
    claim = worker.claim_one()
    lose(lambda: worker.exchange(done(claim)))
    assert worker.exchange(done(claim)).finished == [1]
    assert client.llen(broker.keys.reply("a")) == 1
    assert broker.info().stats["finished_stop"] == 1


def test_an_answer_lost_after_reclaim_as_when_the_reclaimer_is_killed(
    lose: Callable[[Callable[[], Any]], None], far: Broker, broker: Broker, client: Any
) -> None:
    names = ("a", "b", "c")
    for name in names:
        broker.enqueue(name, body(name))
    Worker(broker, "dead").claim()
    for name in names:
        client.zadd(broker.keys.leases, {name: 1}, xx=True)
    reclaim = {"limit": 10, "lease_ms": LEASE_MS, "reply_ttl_ms": TTL_MS}
    lose(lambda: far.reclaim(**reclaim))
    broker.reclaim(**reclaim)  # somebody else's turn
    assert [claim.id for claim in Worker(broker, "heir").claim()] == list(names)
    assert broker.info().stats["reclaimed"] == 3
