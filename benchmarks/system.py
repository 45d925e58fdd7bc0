"""The whole system: a private Valkey, worker processes, and a producer that enqueues and reads every reply."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.machine import peak_mib
from benchmarks.settings import Backend
from benchmarks.workload import Work, workload
from tokenmill.producer.client import Client
from tokenmill.shared.broker import WorkerInfo
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import Reply
from tokenmill.shared.subprocesses import WorkerProcess, worker_argv

QUEUE = "bench"
START_S, REPLY_S, STOP_S = 120.0, 600.0, 10.0
POLL_S = 0.005
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Served:
    """What serving some requests took."""

    seconds: float  # from the first enqueue to the last reply
    output_tokens: int
    replies: tuple[Reply, ...]

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


class System:
    """A context manager around a broker and ``workers`` processes that have computed a little with their model."""

    def __init__(
        self,
        backend: Backend,
        *,
        slots: int,
        threads: int,
        workers: int = 1,
        options: Sequence[str] = (),
        argv: Callable[..., Sequence[str]] = worker_argv,
    ) -> None:
        self._options = ["--queue", QUEUE, "--slots", str(slots), "--threads", str(threads), *backend.options()]
        self._options += ["--parent-pid", str(os.getpid()), *options]
        self._n_workers = workers
        self._argv = argv

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.url = stack.enter_context(EmbeddedBroker()).url
            self.client = Client(self.url, QUEUE)
            self.workers: list[WorkerProcess] = []
            self.n_served = 0
            stack.callback(self._stop)
            for _ in range(self._n_workers):
                self.workers.append(WorkerProcess(self._argv("-q", "--redis", self.url, *self._options)))
            self._wait_ready()
            self.serve([Work(work.prompt, WARM_UP_TOKENS) for work in workload(8 * self._n_workers, seed=0)])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def serve(self, work: Sequence[Work], moments: Sequence[float] | None = None) -> Served:
        """Enqueue all at once, or each at its moment (seconds from now), and read every reply."""
        start = time.perf_counter()
        ids = []
        for i, request in enumerate(work):
            if moments is not None:
                time.sleep(max(0.0, start + moments[i] - time.perf_counter()))
            ids.append(self.client.submit(request.prompt, max_tokens=request.n_output, ignore_eos=True))
        replies = tuple(self._reply(request_id) for request_id in ids)
        self.n_served += len(replies)
        seconds = time.perf_counter() - start
        for request, reply in zip(work, replies, strict=True):
            if (reply.finish_reason, reply.usage.output_tokens) != ("length", request.n_output):
                raise TokenmillError(f"a request ended with {reply.finish_reason}, {reply.usage}: {reply.error}")
        return Served(seconds, sum(request.n_output for request in work), replies)

    def states(self) -> list[WorkerInfo]:
        """The workers that have registered, with what they say of themselves."""
        return [worker for worker in self.client.broker.info().workers if worker.status.get("state") == "running"]

    def peak_mib(self) -> float:
        """Most memory that a worker has had resident so far; NaN where the system does not tell."""
        return max(peak_mib(worker.pid) for worker in self.workers)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while len(self.states()) < self._n_workers:
            self._check_alive()
            if time.monotonic() > deadline:
                raise TokenmillError(f"the workers were not ready within {START_S:.0f} s")
            time.sleep(POLL_S)

    def _reply(self, request_id: str) -> Reply:
        deadline = time.monotonic() + REPLY_S
        while True:
            if self.client.broker.wait_reply(request_id, 1.0):
                return self.client.wait(request_id)
            self._check_alive()
            if time.monotonic() > deadline:
                raise TokenmillError(f"no reply within {REPLY_S:.0f} s")

    def _check_alive(self) -> None:
        for worker in self.workers:
            if not worker.is_running():
                raise TokenmillError(f"a worker ended: {worker.last_words()}")

    def _stop(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.kill(STOP_S)


def timed_argv(trace: Path) -> Callable[..., Sequence[str]]:
    """Command line of a worker that writes down when its model calls begin and end (``timed_worker.py``)."""

    def argv(*arguments: str) -> Sequence[str]:
        return [sys.executable, "-m", "benchmarks.timed_worker", str(trace), *arguments]

    return argv
