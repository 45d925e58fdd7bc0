"""Backpressure: limits that live in the queue, tokens that are counted exactly; and idempotency keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import UsageError

from .driver import TTL_MS, Worker, body, pull_deadline

DAY_MS = 86_400_000


def test_a_queue_at_its_depth_is_full_for_all_producers(broker: Broker, server_url: str, worker: Worker) -> None:
    broker.set_limits(2, 0)
    with connect(server_url) as client:
        other = Broker(client, broker.keys.queue)
        assert [broker.enqueue("a", body("a")).status, other.enqueue("b", body("b")).status] == ["ok", "ok"]
        refused = other.enqueue("c", body("c"), priority="high")

    assert (refused.status, refused.depth, refused.queued_tokens) == ("full", 2, 0)
    assert refused.retry_after_ms > 0
    assert (broker.state("c"), broker.info().waiting, broker.info().stats["full"]) == (None, 2, 1)
    assert broker.enqueue("a", body("a")).status == "duplicate"
    worker.slots = 1
    worker.claim()
    assert broker.enqueue("c", body("c")).status == "ok"


def test_one_limit_is_set_without_the_other(broker: Broker) -> None:
    broker.set_limits(2, 100)
    broker.set_limits(max_depth=3)
    broker.set_limits(max_queued_tokens=0)
    assert (broker.info().max_depth, broker.info().max_queued_tokens) == (3, 0)


def test_what_was_begun_before_counts_as_waiting(broker: Broker, worker: Worker) -> None:
    broker.set_limits(1, 0)
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    broker.release("w", [("a", claim.fence)])
    assert broker.enqueue("b", body("b")).status == "full"


def test_queued_tokens_are_counted_until_a_request_is_begun_or_ends(
    broker: Broker, client: Any, worker: Worker, reclaim: Callable[..., int]
) -> None:
    def queued() -> int:
        return broker.info().queued_tokens

    for i, name in enumerate(("claimed", "cancelled", "late", "emptied")):
        assert broker.enqueue(name, body(name), cost=10**i).queued_tokens == queued()
    assert queued() == 1111
    broker.enqueue("claimed", body("claimed"), cost=1)
    client.rpush(broker.keys.requests, body("bare"))
    assert queued() == 1111
    broker.cancel("cancelled")
    assert queued() == 1101
    pull_deadline(client, broker, "late")
    reclaim()
    assert queued() == 1001
    worker.slots = 1
    claim = worker.claim_one()
    assert queued() == 1000
    broker.release("w", [("claimed", claim.fence)])
    assert queued() == 1000
    broker.empty()
    assert (queued(), broker.info().waiting) == (0, 0)


def test_a_request_above_the_limit_of_tokens_passes_when_none_are_queued(broker: Broker, worker: Worker) -> None:
    broker.set_limits(0, 100)
    assert broker.enqueue("huge", body("huge"), cost=1000).status == "ok"
    refused = broker.enqueue("small", body("small"), cost=1)
    assert (refused.status, refused.depth, refused.queued_tokens) == ("full", 1, 1000)
    worker.claim()
    assert [broker.enqueue(name, body(name), cost=50).status for name in ("a", "b", "c")] == ["ok", "ok", "full"]


def test_limits_may_be_lifted(broker: Broker) -> None:
    broker.set_limits(1, 1)
    assert (broker.info().max_depth, broker.info().max_queued_tokens) == (1, 1)
    broker.set_limits(0, 0)
    assert (broker.info().max_depth, broker.info().max_queued_tokens) == (0, 0)
    assert [broker.enqueue(name, body(name), cost=9).status for name in ("a", "b")] == ["ok", "ok"]


def test_bare_pushes_are_never_refused_and_cost_nothing(broker: Broker, client: Any, worker: Worker) -> None:
    broker.set_limits(1, 1)
    client.rpush(broker.keys.requests, body("a"), body("b"))
    assert [claim.id for claim in worker.claim()] == ["a", "b"]
    assert broker.info().queued_tokens == 0


def test_the_counts_are_right_again_after_somebody_deleted_the_lists(broker: Broker, client: Any) -> None:
    broker.set_limits(0, 100)
    broker.enqueue("a", body("a"), cost=90)
    broker.enqueue("b", body("b"))
    broker.cancel("b")
    client.delete(broker.keys.requests)
    answer = broker.enqueue("c", body("c"), cost=90)
    assert (answer.status, answer.depth, answer.queued_tokens) == ("ok", 1, 90)


def test_the_same_key_is_the_same_request_whatever_its_id(broker: Broker, worker: Worker) -> None:
    assert broker.enqueue("first", body("first"), idempotency_key="k").id == "first"
    again = broker.enqueue("second", body("second"), idempotency_key="k")
    assert (again.status, again.state, again.id, again.depth) == ("duplicate", "waiting", "first", 1)
    assert broker.state("second") is None

    worker.finish(worker.claim_one())
    assert broker.enqueue("third", body("third"), idempotency_key="k")[:2] == ("duplicate", "stop")


def test_the_order_of_the_fields_makes_no_other_body(broker: Broker) -> None:
    broker.enqueue("a", b'{"id": "a", "prompt": "x", "seed": 1}', idempotency_key="k")
    assert broker.enqueue("b", b'{"seed":1,"prompt":"x","id":"b"}', idempotency_key="k").status == "duplicate"


def test_another_body_under_the_same_key_is_a_conflict(broker: Broker) -> None:
    broker.enqueue("first", body("first"), idempotency_key="k")
    other = broker.enqueue("second", body("second", 1), idempotency_key="k")
    assert (other.status, other.id) == ("conflict", "first")
    assert (broker.state("second"), broker.info().waiting) == (None, 1)


def test_the_reply_lives_as_long_as_its_key(broker: Broker, client: Any, worker: Worker) -> None:
    for name in ("kept", "cancelled"):
        broker.enqueue(name, body(name), stream=True, idempotency_key=name)
    broker.cancel("cancelled")
    worker.finish(worker.claim_one())

    for name in ("kept", "cancelled"):
        key_ttl = client.pttl(broker.keys.idem(name))
        assert DAY_MS - 60_000 < key_ttl <= DAY_MS
        assert abs(client.pttl(broker.keys.reply(name)) - key_ttl) < 1000
        assert abs(client.pttl(broker.keys.tokens(name)) - key_ttl) < 1000
        assert client.pttl(broker.keys.request(name)) > key_ttl


def test_a_key_that_lives_shorter_than_a_reply_shortens_no_reply(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"), idempotency_key="k", idempotency_ttl_ms=5_000)
    worker.finish(worker.claim_one())
    assert TTL_MS - 5_000 < client.pttl(broker.keys.reply("a")) <= TTL_MS


def test_a_request_that_was_refused_takes_no_key(broker: Broker) -> None:
    broker.set_limits(1, 0)
    broker.enqueue("a", body("a"))
    assert broker.enqueue("b", body("b", 1), idempotency_key="k").status == "full"
    broker.set_limits(0, 0)
    assert broker.enqueue("c", body("c", 2), idempotency_key="k")[:2] == ("ok", "waiting")


def test_a_full_queue_still_answers_for_a_known_key(broker: Broker) -> None:
    broker.set_limits(1, 0)
    broker.enqueue("a", body("a"), idempotency_key="k")
    assert broker.enqueue("b", body("b"), idempotency_key="k").status == "duplicate"


def test_a_key_whose_request_is_forgotten_says_so(broker: Broker, client: Any) -> None:
    broker.enqueue("a", body("a"), idempotency_key="k")
    client.delete(broker.keys.request("a"))
    assert broker.enqueue("b", body("b"), idempotency_key="k")[:2] == ("duplicate", "forgotten")


@pytest.mark.parametrize("key", ["", "two words", "x" * 129])
def test_a_key_that_cannot_be_is_refused_before_it_is_sent(key: str, broker: Broker) -> None:
    with pytest.raises(UsageError, match="idempotency key"):
        broker.enqueue("a", body("a"), idempotency_key=key)
