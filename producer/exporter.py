"""The process that tells Prometheus about a queue, and where its workers are."""

from __future__ import annotations

import logging
import signal
import threading

from prometheus_client import CollectorRegistry

from tokenmill.producer.workplace import open_broker
from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.exporter import Exporter
from tokenmill.shared.queue_metrics import QueueMetrics, targets

log = logging.getLogger(__name__)


def serve_metrics(redis: str | None, queue: str, *, host: str, port: int) -> None:
    """Serve ``/metrics`` of a queue, and its workers' addresses on ``/targets``, until SIGTERM or Ctrl-C."""
    broker = open_broker(redis, queue)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    registry = CollectorRegistry()
    registry.register(QueueMetrics(broker))
    pages = {"/targets": lambda: targets(broker.info())}
    with Exporter(registry, host=host, port=port, ready=lambda: _away(broker), pages=pages) as served:
        log.info("metrics of queue %s on http://%s:%d/metrics", queue, host, served.port)
        stop.wait()


def _away(broker: Broker) -> str | None:
    try:
        broker.check()
    except TokenmillError as error:
        return str(error)
    return None
