"""A worker's metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.shared.protocol import FinishReason
from tokenmill.worker.meter import Distribution
from tokenmill.worker.runner import Runner

PREFIX = "tokenmill_"


class WorkerMetrics(Collector):
    """What one worker has done, in series that end with it; the labels are its queue and its name."""

    def __init__(self, runner: Runner, *, queue: str, worker: str, model: str) -> None:
        self._runner = runner
        self._labels = {"queue": queue, "worker": worker}
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now."""
        yield self._gauge("worker_info", "1; the model is a label.", 1, model=self._model)
        yield self._gauge("slots", "Requests that can run at the same time.", self._runner.slots)
        yield self._gauge("slots_busy", "Slots that hold a request now.", len(self._runner))
        yield from self._counters()
        yield from self._distributions()

    def _counters(self) -> Iterator[Metric]:
        totals, meter = self._runner.totals, self._runner.meter
        busy = "Requests in a step times its duration, summed: over seconds, how many slots were at work."
        yield self._counter("slots_busy_seconds", busy, meter.busy_seconds)
        yield self._counter("prompt_tokens", "Tokens of the prompts of requests taken in.", totals.prompt_tokens)
        yield self._counter("output_tokens", "Tokens generated.", totals.output_tokens)
        reused = "Prompt tokens not computed, because an earlier request began with them."
        yield self._counter("reused_tokens", reused, totals.reused_tokens)
        preempted = "Times that a running request had to give its memory to older ones."
        yield self._counter("preemptions", preempted, totals.preemptions)
        padded = "Cells of a padded model's rectangles that were computed for nothing."
        yield self._counter("padded_tokens", padded, self._runner.padded_tokens)
        replies = CounterMetricFamily(PREFIX + "requests", "Replies made.", labels=[*self._labels, "finish_reason"])
        for reason in get_args(FinishReason):
            replies.add_metric([*self._labels.values(), reason], meter.finished[reason])
        yield replies

    def _distributions(self) -> Iterator[Metric]:
        meter = self._runner.meter
        yield self._histogram("step_seconds", "Duration of a step.", meter.step_seconds)
        yield self._histogram("step_rows", "Requests in a step: the batch size.", meter.step_rows)
        yield self._histogram("step_tokens", "Tokens computed in a step.", meter.step_tokens)
        yield self._histogram("queue_time_seconds", "From enqueue to the first claim.", meter.queue_seconds)
        first = "From enqueue to the first output token."
        yield self._histogram("time_to_first_token_seconds", first, meter.first_token_seconds)
        between = "From one output token of a request to the next."
        yield self._histogram("inter_token_latency_seconds", between, meter.inter_token_seconds)
        yield self._histogram("e2e_latency_seconds", "From enqueue to the reply.", meter.e2e_seconds)
        yield self._histogram("request_prompt_tokens", "Prompt tokens of a request.", meter.prompt_tokens)
        yield self._histogram("request_output_tokens", "Output tokens of a request.", meter.output_tokens)

    def _gauge(self, name: str, about: str, value: float, **more: str) -> Metric:
        labels = {**self._labels, **more}
        family = GaugeMetricFamily(PREFIX + name, about, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, about: str, distribution: Distribution) -> Metric:
        buckets, total = distribution.read()
        family = HistogramMetricFamily(PREFIX + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family
