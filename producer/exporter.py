"""The process that tells Prometheus about a queue, and where its workers are."""

from __future__ import annotations

import logging
import signal
import threading

import click
from prometheus_client import CollectorRegistry

from tokenmill.producer.workplace import open_broker
from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.exporter import Exporter
from tokenmill.shared.options import extra_option, option
from tokenmill.shared.queue_metrics import QueueMetrics, targets

log = logging.getLogger(__name__)

DEFAULT_PORT = 9100


@click.command(short_help="Serve a queue's metrics.")
@option("redis")
@option("queue")
@option("metrics_host")
@extra_option(
    "metrics_port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="Port to listen on; 0 takes a free one."
)
def exporter(redis: str | None, queue: str, metrics_host: str, metrics_port: int) -> None:
    """Serve a queue's metrics on /metrics, and its workers' addresses on /targets, for Prometheus to find them.

    One is enough for a queue: it looks at the broker when it is asked, and keeps nothing.
    """
    broker = open_broker(redis, queue)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    registry = CollectorRegistry()
    registry.register(QueueMetrics(broker))
    pages = {"/targets": lambda: targets(broker.info())}
    with Exporter(registry, host=metrics_host, port=metrics_port, ready=lambda: _away(broker), pages=pages) as served:
        log.info("metrics of queue %s on http://%s:%d/metrics", queue, metrics_host, served.port)
        stop.wait()


def _away(broker: Broker) -> str | None:
    try:
        broker.check()
    except TokenmillError as error:
        return str(error)
    return None
