"""A broker at maxmemory takes no new requests, whatever else the queue looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.producer.client import Client
from tokenmill.producer.feed import Feed
from tokenmill.producer.request import QueueFullError, check_request
from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import BrokerFullError

from ..broker.driver import Worker, body, done


@pytest.fixture
def full(client: Any) -> Iterator[None]:
    yield
    client.config_set("maxmemory", "0")


@pytest.mark.usefixtures("full")
def test_a_client_waits_for_room_or_raises_as_it_was_asked(broker: Broker, client: Any) -> None:
    pauses: list[float] = []

    def make_room(seconds: float) -> None:
        pauses.append(seconds)
        client.config_set("maxmemory", "0")

    producer = Client(broker, sleep=make_room)
    producer.submit("x", id="before")
    client.config_set("maxmemory", "1mb")
    with pytest.raises(
        QueueFullError, match=r"is full \(maxmemory\): let the workers .*; try again in 1 s$"
    ) as refused:
        producer.submit("x", id="a", when_full="raise")
    assert refused.value.retry_after == 1
    assert producer.submit("x", id="before", when_full="raise") == "before"  # what is known needs no room
    assert (broker.state("a"), pauses) == (None, [])
    assert producer.submit("x", id="a") == "a"
    assert (broker.state("a"), pauses) == ("waiting", [1])


@pytest.mark.usefixtures("full")
def test_a_feed_goes_on_when_there_is_room(broker: Broker, client: Any) -> None:
    now = [0.0]
    feed = Feed(broker, [check_request({"id": "a", "prompt": "x"})], clock=lambda: now[0], sleep=lambda _: None)
    client.config_set("maxmemory", "1mb")
    assert (feed.poll(0), broker.state("a")) == ([], None)
    client.config_set("maxmemory", "0")
    now[0] = 1.0
    assert (feed.poll(0), broker.state("a")) == ([], "waiting")
    claim = Worker(broker).claim_one()
    reply = b'{"id":"a","finish_reason":"stop","text":"y","usage":{"prompt_tokens":1,"output_tokens":1}}'
    Worker(broker, ack=claim.fence).exchange(done(claim)._replace(body=reply))
    replies = []
    while not feed.done:
        replies += feed.poll(0.1)
    assert [reply.text for reply in replies] == ["y"]


@pytest.mark.usefixtures("full")
def test_a_request_is_refused_where_the_lists_are_empty_and_tokens_were_counted(broker: Broker, client: Any) -> None:
    broker.enqueue("a", body("a"), cost=10)
    claim = Worker(broker).claim_one()
    client.config_set("maxmemory", "1mb")
    for name in ("b", "c"):
        with pytest.raises(BrokerFullError, match=r"is full \(maxmemory\)"):
            broker.enqueue(name, body(name), cost=10)
    assert Worker(broker, ack=claim.fence).finish(claim) == 1
    client.config_set("maxmemory", "0")
    assert broker.enqueue("b", body("b"), cost=10).queued_tokens == 10
