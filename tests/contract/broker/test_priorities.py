"""High, normal and low: who comes first, who starves (nobody), and who wakes an idle worker."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import TokenmillError

from .driver import Worker, body


def fill(broker: Broker, total: int, *priorities: Any) -> None:
    for i in range(total):
        for priority in priorities:
            broker.enqueue(f"{priority}{i}", body(f"{priority}{i}"), priority=priority)


def kinds(worker: Worker, total: int) -> list[str]:
    """The priorities of the next requests, as they come to a worker of one slot."""
    worker.slots, kinds = 1, []
    for _ in range(total):
        claim = worker.claim_one()
        worker.finish(claim)
        kinds.append(claim.id.rstrip("0123456789"))
    return kinds


def test_under_load_every_priority_gets_its_share_and_none_starves(broker: Broker, worker: Worker) -> None:
    fill(broker, 40, "high", "normal", "low")
    taken = kinds(worker, 48)
    assert Counter(taken) == {"high": 36, "normal": 9, "low": 3}
    assert taken[:4] == ["high", "high", "high", "normal"]


def test_the_shares_are_the_same_when_many_are_taken_at_once(broker: Broker, worker: Worker) -> None:
    fill(broker, 20, "high", "normal", "low")
    worker.slots = 16
    assert Counter(claim.id.rstrip("0123456789") for claim in worker.claim()) == {"high": 12, "normal": 3, "low": 1}


def test_turns_that_nobody_needs_go_to_who_waits(broker: Broker, worker: Worker) -> None:
    fill(broker, 3, "low")
    fill(broker, 3, "normal")
    assert kinds(worker, 6) == ["normal"] * 3 + ["low"] * 3


def test_requests_of_one_priority_keep_their_order(broker: Broker, worker: Worker) -> None:
    fill(broker, 20, "high", "low")
    worker.slots = 40
    ids = [claim.id for claim in worker.claim()]
    for priority in ("high", "low"):
        mine = [name for name in ids if name.startswith(priority)]
        assert mine == [f"{priority}{i}" for i in range(20)]


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_an_idle_worker_is_woken_at_once(broker: Broker, priority: Any) -> None:
    woken: list[float] = []

    def wait() -> None:
        assert broker.peek(2)
        woken.append(time.monotonic())

    idle = threading.Thread(target=wait)
    idle.start()
    enqueued = time.monotonic()
    broker.enqueue("a", body("a"), priority=priority)
    idle.join()
    assert woken[0] - enqueued < 1


def test_a_poke_is_no_request(broker: Broker, client: Any, worker: Worker) -> None:
    broker.set_limits(3, 0)
    answers = [broker.enqueue(name, body(name), priority="high") for name in ("a", "b")]
    assert client.lrange(broker.keys.requests, 0, -1) == [b"~"]
    assert [answer.depth for answer in answers] == [1, 2]
    assert (broker.info().waiting, broker.info().normal, broker.info().high) == (2, 0, 2)
    assert broker.enqueue("c", body("c")).depth == 3
    assert [claim.id for claim in worker.claim()] == ["a", "b", "c"]
    assert client.exists(broker.keys.requests) == 0
    assert "dead_letters" not in broker.info().stats


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_bare_push_is_legal_on_every_list(broker: Broker, client: Any, worker: Worker, priority: str) -> None:
    client.rpush(getattr(broker.keys, priority), body("bare"))
    assert broker.peek(0.01) is True
    assert (broker.info().waiting, broker.info().oldest_age_ms) == (1, None)
    assert worker.claim_one().id == "bare"


def test_what_goes_back_wakes_an_idle_worker_too(
    broker: Broker, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    worker.claim_one()
    lapse()
    threading.Timer(0.05, reclaim).start()
    started = time.monotonic()
    assert broker.peek(2) is True
    assert time.monotonic() - started < 1.5


def test_the_age_is_that_of_the_next_in_line_whatever_list_it_is_on(broker: Broker, client: Any) -> None:
    broker.enqueue("low", body("low"), priority="low")
    client.hset(broker.keys.request("low"), "enqueued", 1)
    assert (broker.info().oldest_age_ms or 0) > 1_000_000_000
    broker.enqueue("a", body("a"))
    assert (broker.info().oldest_age_ms or 0) < 60_000


def test_a_priority_that_cannot_be_is_refused_and_leaves_nothing_behind(broker: Broker, client: Any) -> None:
    with pytest.raises(TokenmillError, match="no such priority"):
        broker.enqueue("a", body("a"), priority="urgent")  # type: ignore[arg-type]
    assert client.keys(f"{broker.keys.meta.removesuffix('meta')}*") == []
