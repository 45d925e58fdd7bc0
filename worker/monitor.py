"""What a worker shows of itself: its status, its metrics, and what probes of liveness and readiness are told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Protocol, Self

import msgspec
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from tokenmill.shared.exporter import Exporter
from tokenmill.shared.protocol import WorkerStatus
from tokenmill.shared.settings import Settings
from tokenmill.worker.leases import Pulse
from tokenmill.worker.metrics import WorkerMetrics
from tokenmill.worker.runner import Runner

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Contact(Protocol):
    """Whatever keeps the worker's requests at the broker."""

    @property
    def silence_s(self) -> float:
        """Seconds since the broker answered."""


class Monitor:
    """Serves ``/metrics``, ``/livez`` and ``/readyz`` of one worker from before its model is loaded, if a port is set.

    A worker that loads its model is alive, but not ready. A step longer than half of the stall timeout, at whose end
    the process gives up, is none that moves; a broker that has been silent for a whole lease is away.
    """

    def __init__(self, settings: Settings, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._last_status = clock(), 0  # when, and output tokens by then
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)
        self._worker: tuple[Runner, Pulse, Contact] | None = None
        self._stack = ExitStack()
        self.address: str | None = None
        """HOST:PORT of the pages, for those who look for workers to watch."""

    def __enter__(self) -> Self:
        host, port = self._settings.metrics_host, self._settings.metrics_port
        if port is not None:
            exporter = Exporter(self._registry, host=host, port=port, live=self.stalled, ready=self.unready)
            self._stack.enter_context(exporter)
            self.address = f"{host if host in _LOOPBACK else socket.gethostname()}:{exporter.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch(self, runner: Runner, pulse: Pulse, contact: Contact, *, model: str) -> None:
        """The model is loaded: from now on tell of the worker made of these."""
        self._worker = runner, pulse, contact
        self._registry.register(WorkerMetrics(runner, queue=self._settings.queue, worker=self._name, model=model))

    def status(self, runner: Runner, model: str) -> bytes:
        """What the worker says of itself with every renewal, as JSON."""
        now, tokens = self._clock(), runner.totals.output_tokens
        before, tokens_before = self._last_status
        self._last_status = now, tokens
        status = WorkerStatus(
            model=model,
            slots=runner.slots,
            busy=len(runner),
            state="draining" if runner.draining else "running",
            pid=os.getpid(),
            host=socket.gethostname(),
            metrics=self.address,
            output_tokens_per_s=round((tokens - tokens_before) / max(now - before, 0.001), 1),
            cells=runner.cells(),
            **asdict(runner.totals),
        )
        return msgspec.json.encode(status)

    def stalled(self) -> str | None:
        """Why the worker does not live, in one line; None if its loop moves or has nothing to do."""
        age_s = self._worker[1].age_s if self._worker else 0.0
        if age_s <= self._settings.stall_timeout_s / 2:
            return None
        return f"the loop stands still: its step has been running for {age_s:.0f} s"

    def unready(self) -> str | None:
        """Why nothing is claimed now, in one line; None if requests are."""
        if self._worker is None:
            return "the model is being loaded"
        runner, _, contact = self._worker
        if runner.draining:
            return "draining: no more requests are claimed"
        if contact.silence_s > self._settings.lease_ms / 1000:
            return f"the broker has not answered for {contact.silence_s:.0f} s"
        return self.stalled()
