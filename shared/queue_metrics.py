"""A queue's metrics, read from its broker when they are asked for, and where its workers tell theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.shared.broker import Broker, QueueInfo
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import FinishReason

_PREFIX = "tokenmill_"
_STATES = ("running", "draining")
_CAUSES = {"crash": "reclaimed", "drain": "released"}  # of a request's return to the queue → the broker's counter
_COUNTERS = {
    "enqueued": "Requests accepted.",
    "duplicates": "Pushes of a request that was there already.",
    "full": "Requests refused because the queue was full.",
    "fenced": "Late writes of workers that had lost their lease.",
    "suspected": "Requests that crashed two workers and wait to be run alone.",
    "dead_letters": "Pushes that were no requests, and requests given up.",
    "script_errors": "Items that the broker's scripts could not handle.",
}


class QueueMetrics(Collector):
    """One look at the broker for every scrape; while it does not answer, ``tokenmill_broker_up`` is 0 and alone."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._queue = broker.keys.queue

    def describe(self) -> Iterator[Metric]:
        """Nothing: to be registered must not ask the broker."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now."""
        try:
            info = self._broker.info()
        except TokenmillError:
            yield self._gauge("broker_up", "Whether the broker answers.", 0)
            return
        yield self._gauge("broker_up", "Whether the broker answers.", 1)
        yield from self._depths(info)
        yield self._workers(info)
        yield from self._counters(info.stats)

    def _depths(self, info: QueueInfo) -> Iterator[Metric]:
        yield self._gauge("requests_waiting", "Requests that no worker runs.", info.waiting)
        yield self._gauge("requests_running", "Requests that a worker runs.", info.running)
        oldest = "How long the next request in line has been waiting; 0 where none is."
        yield self._gauge("queue_oldest_age_seconds", oldest, (info.oldest_age_ms or 0) / 1000)
        yield self._gauge("queued_tokens", "Tokens that waiting requests may take.", info.queued_tokens)
        yield self._gauge("queue_max_depth", "Limit of waiting requests; 0: none.", info.max_depth)
        yield self._gauge("queue_suspended", "1 while nothing new is begun.", info.suspended)
        yield self._gauge("dead_letters", "Dead letters that are kept.", info.dead)

    def _workers(self, info: QueueInfo) -> Metric:
        states = Counter(str(worker.status.get("state")) for worker in info.workers)
        family = GaugeMetricFamily(_PREFIX + "workers", "Workers that are alive.", labels=["queue", "state"])
        for state in _STATES:
            family.add_metric([self._queue, state], states[state])
        return family

    def _counters(self, stats: dict[str, int]) -> Iterator[Metric]:
        for name, about in _COUNTERS.items():
            yield self._counter(f"queue_{name}", about, {"": stats.get(name, 0)})
        returned = {cause: stats.get(counter, 0) for cause, counter in _CAUSES.items()}
        yield self._counter("requeued", "Running requests that went back to the queue.", returned, "cause")
        ended = {reason: stats.get(f"finished_{reason}", 0) for reason in get_args(FinishReason)}
        yield self._counter("queue_finished", "Requests that ended, with or without a worker.", ended, "finish_reason")

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, about, labels=["queue"])
        family.add_metric([self._queue], value)
        return family

    def _counter(self, name: str, about: str, values: dict[str, int], label: str | None = None) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, about, labels=["queue", *([label] if label else [])])
        for value, count in values.items():
            family.add_metric([self._queue, *([value] if label else [])], count)
        return family


def targets(info: QueueInfo) -> bytes:
    """The workers to scrape, as Prometheus reads them over HTTP (``http_sd_configs``)."""
    addresses = [worker.status.get("metrics") for worker in info.workers]
    return msgspec.json.encode([{"targets": [address], "labels": {}} for address in addresses if address])
