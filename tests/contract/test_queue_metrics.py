"""A queue's metrics, read from a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tokenmill.producer.client import Client
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.queue_metrics import QueueMetrics, targets


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


def scraped(broker: Broker) -> str:
    registry = CollectorRegistry()
    registry.register(QueueMetrics(broker))
    return generate_latest(registry).decode()


def status(address: str | None, state: str = "running") -> bytes:
    return msgspec.json.encode({"state": state, "metrics": address})


def test_depths_workers_and_counters_are_those_of_the_broker(url: str) -> None:
    broker = Broker(connect(url), "depths")
    client = Client(broker)
    client.submit("a", id="a")
    client.submit("a", id="a")
    client.submit("b", id="b")
    client.cancel(client.submit("c"))
    broker.exchange("w", slots=1, ack=0, lease_ms=9000, reply_ttl_ms=9000, finished=[], checkpoints=[])
    broker.renew("w", [], lease_ms=9000, status=status(None))
    text = scraped(broker)
    for line in (
        'tokenmill_broker_up{queue="depths"} 1.0',
        'tokenmill_requests_waiting{queue="depths"} 1.0',
        'tokenmill_requests_running{queue="depths"} 1.0',
        'tokenmill_workers{queue="depths",state="running"} 1.0',
        'tokenmill_workers{queue="depths",state="draining"} 0.0',
        'tokenmill_queue_enqueued_total{queue="depths"} 3.0',
        'tokenmill_requeued_total{cause="crash",queue="depths"} 0.0',
        'tokenmill_queue_finished_total{finish_reason="cancelled",queue="depths"} 1.0',
    ):
        assert line in text, line


def test_a_waiting_request_has_an_age_and_an_empty_queue_none(url: str) -> None:
    broker = Broker(connect(url), "ages")
    assert 'tokenmill_queue_oldest_age_seconds{queue="ages"} 0.0' in scraped(broker)
    Client(broker).submit("a")
    while 'tokenmill_queue_oldest_age_seconds{queue="ages"} 0.0' in scraped(broker):
        pass  # until a millisecond has passed


def test_a_worker_that_ended_leaves_no_series_and_no_target(url: str) -> None:
    broker = Broker(connect(url), "ended")
    broker.renew("w", [], lease_ms=9000, status=status("10.0.0.1:9100"))
    broker.renew("silent", [], lease_ms=9000, status=status(None))
    assert msgspec.json.decode(targets(broker.info())) == [{"targets": ["10.0.0.1:9100"], "labels": {}}]
    for worker in ("w", "silent"):
        broker.release(worker, [])
    assert targets(broker.info()) == b"[]"
    assert 'tokenmill_workers{queue="ended",state="running"} 0.0' in scraped(broker)


def test_a_broker_that_does_not_answer_is_down_and_nothing_else() -> None:
    with EmbeddedBroker() as embedded:
        broker = Broker(connect(embedded.url), "away")
    lines = [line for line in scraped(broker).splitlines() if not line.startswith("#")]
    assert lines == ['tokenmill_broker_up{queue="away"} 0.0']
