"""What operators do to a queue: one model, suspend and resume, empty; and the same on a broker that is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenmill.shared.broker import Broker, Checkpoint
from tokenmill.shared.protocol import Reply

from .driver import LEASE_MS, TTL_MS, Worker, body, done


def register(broker: Broker, worker: str, model: str) -> str:
    return broker.register(worker, model, lease_ms=LEASE_MS)


def test_the_first_worker_gives_the_queue_its_model(broker: Broker) -> None:
    assert broker.info().model is None
    assert register(broker, "w1", "model-a") == "model-a"
    assert register(broker, "w2", "model-b") == "model-a"
    assert register(broker, "w2", "model-a") == "model-a"
    assert broker.info().model == "model-a"
    assert {worker.name for worker in broker.info().workers} == {"w1", "w2"}


@pytest.mark.parametrize("what", ["another worker", "a bare push", "a request", "a running request", "one to resume"])
def test_a_queue_in_use_keeps_its_model(what: str, broker: Broker, client: Any, worker: Worker) -> None:
    register(broker, "w1", "model-a")
    if what == "a bare push":
        client.rpush(broker.keys.low, body("a"))
    elif what != "another worker":
        broker.enqueue("a", body("a"))
    if what in ("a running request", "one to resume"):
        claim = worker.claim_one()
    if what == "one to resume":
        broker.release("w", [("a", claim.fence)])
    if what != "another worker":
        broker.release("w1", [])
    assert register(broker, "w2", "model-b") == "model-a"


def test_an_unused_queue_may_change_its_model(broker: Broker, client: Any, worker: Worker) -> None:
    register(broker, "w1", "model-a")
    broker.enqueue("done", body("done"))
    worker.finish(worker.claim_one())
    broker.release("w1", [])
    assert register(broker, "w2", "model-b") == "model-b"
    assert register(broker, "w2", "model-c") == "model-c"  # only itself is there

    client.zincrby(broker.keys.workers, -3 * LEASE_MS - 1000, "w2")  # silent for long
    assert register(broker, "w3", "model-d") == "model-d"


def test_a_suspended_queue_begins_nothing_and_accepts_everything(broker: Broker, worker: Worker) -> None:
    for name in ("running", "begun"):
        broker.enqueue(name, body(name))
    running, begun = worker.claim()
    broker.suspend()
    broker.suspend()
    broker.release("w", [("begun", begun.fence)])

    assert broker.enqueue("new", body("new"), priority="high").status == "ok"
    assert worker.claim() == []
    saved = [Checkpoint("running", running.fence, 0, [1], "x")]
    assert worker.exchange(checkpoints=saved).checkpoints == [1]
    assert worker.finish(running) == 1
    assert (broker.info().suspended, broker.info().waiting) == (True, 2)

    broker.resume()
    assert broker.info().suspended is False
    assert [claim.id for claim in worker.claim()] == ["begun", "new"]


def test_an_emptied_queue_has_answered_everything(
    broker: Broker, client: Any, worker: Worker, make_worker: Callable[..., Worker]
) -> None:
    for name in ("running", "begun"):
        broker.enqueue(name, body(name))
    running, begun = worker.claim()
    worker.exchange(checkpoints=[Checkpoint("begun", begun.fence, 0, [1], "so far")])
    broker.release("w", [("begun", begun.fence)])
    for priority in ("high", "normal", "low"):
        broker.enqueue(priority, body(priority), priority=priority)
    client.rpush(broker.keys.requests, body("bare"), body("low"), b"junk", b'{"id": "broken", ')

    assert broker.empty(reply_ttl_ms=TTL_MS) == 5

    names = ["begun", "high", "normal", "low", "bare"]
    replies = [msgspec.json.decode(broker.wait_reply(name, 0) or b"", type=Reply) for name in names]
    assert [reply.finish_reason for reply in replies] == ["cancelled"] * 5
    assert [reply.text for reply in replies] == ["so far", "", "", "", ""]
    assert broker.state("broken") == "error"
    assert (broker.info().waiting, broker.info().dead) == (0, 2)
    assert client.exists(broker.keys.high, broker.keys.requests, broker.keys.low, broker.keys.resume) == 0
    assert worker.finish(running) == 1
    assert make_worker("other").claim() == []


def test_a_long_queue_is_emptied_in_bounded_steps(broker: Broker, client: Any) -> None:
    for batch in range(3):
        client.rpush(broker.keys.requests, *[body(f"{batch}-{i}") for i in range(500)])
    before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert broker.empty() == 1500
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before in (4, 5)  # one more to load the script


def test_operators_are_heard_by_a_full_broker(broker: Broker, client: Any, worker: Worker) -> None:
    for name in ("running", "waiting", "other"):
        broker.enqueue(name, body(name), timeout_ms=60_000)
    worker.slots = 1
    running = worker.claim_one()
    client.config_set("maxmemory", "1mb")
    try:
        assert broker.cancel("waiting") == "cancelled"
        assert broker.cancel("running") == "signalled"
        assert broker.cancel("unknown") == "remembered"
        broker.set_limits(max_depth=5)
        broker.suspend()
        broker.resume()
        assert worker.exchange(done(running, "cancelled"), slots=0).finished == [1]
        assert broker.empty() == 1
    finally:
        client.config_set("maxmemory", "0")
    assert [broker.state(name) for name in ("running", "waiting", "other")] == ["cancelled"] * 3
