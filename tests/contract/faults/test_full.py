"""A broker at maxmemory takes no new requests, whatever else the queue looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import TokenmillError

from ..broker.driver import Worker, body


@pytest.fixture
def full(client: Any) -> Iterator[None]:
    yield
    client.config_set("maxmemory", "0")


@pytest.mark.usefixtures("full")
def test_a_request_is_refused_where_the_lists_are_empty_and_tokens_were_counted(broker: Broker, client: Any) -> None:
    broker.enqueue("a", body("a"), cost=10)
    claim = Worker(broker).claim_one()
    client.config_set("maxmemory", "1mb")
    for name in ("b", "c"):
        with pytest.raises(TokenmillError, match=r"is full \(maxmemory\)"):
            broker.enqueue(name, body(name), cost=10)
    assert Worker(broker, ack=claim.fence).finish(claim) == 1
    client.config_set("maxmemory", "0")
    assert broker.enqueue("b", body("b"), cost=10).queued_tokens == 10
