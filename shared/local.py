"""A broker and workers of one's own, on this machine, for as long as a command runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

from tokenmill.shared import log
from tokenmill.shared.broker import Broker, WorkerInfo, connect
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import BrokerUnreachableError, ModelLoadError, TokenmillError, UsageError
from tokenmill.shared.subprocesses import ERROR_PREFIX, WorkerProcess, describe_exit, processors, worker_argv

STOP_GRACE_S = 2.0  # idle workers end at once; what still runs has nobody left to read it
READY_POLL_S = 0.05

_logger = logging.getLogger(__name__)

# Exit codes that another start would only repeat.
_FINAL = {error.exit_code: error for error in (UsageError, ModelLoadError)}


class LocalPool:
    """A context manager around an embedded broker and ``workers`` processes of ``tokenmill worker``.

    Call ``check`` every now and then: it starts crashed workers again. Workers and broker end with the block, and by
    themselves when this process dies.
    """

    broker: Broker

    def __init__(
        self,
        *,
        workers: int,
        slots: int,
        model: str,
        queue: str,
        argv: Callable[..., Sequence[str]] = worker_argv,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = workers
        threads = max(1, processors() // workers)
        self._options = ["--slots", str(slots), "--model", model, "--queue", queue, "--threads", str(threads)]
        self._options += ["--parent-pid", str(os.getpid())]
        self._queue = queue
        self._argv = argv
        self._clock = clock
        self._workers: list[WorkerProcess] = []
        self._was_ready: set[int] = set()  # pids

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._embedded = stack.enter_context(EmbeddedBroker())
            url = self._embedded.url
            self.broker = Broker(connect(url), self._queue)
            stack.callback(self._stop)
            argv = self._argv("-v" if log.is_verbose() else "-q", "--redis", url, *self._options)
            for _ in range(self._count):
                self._workers.append(WorkerProcess(argv, clock=self._clock))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.pid for worker in self._workers if worker.is_running()]

    def wait_ready(self, show: Callable[[int, int], object] = lambda _ready, _all: None) -> None:
        """Wait until every worker has loaded its model; ``show`` is called with (ready, all) as they come.

        Raises the error of a worker that cannot start: ModelLoadError for a model that cannot be loaded.
        """
        shown = -1
        while shown < self._count:
            ready = sum(worker.status.get("state") == "running" for worker in self.workers())
            if ready != shown:
                shown = ready
                show(ready, self._count)
            self.check()
            if ready < self._count:
                time.sleep(READY_POLL_S)

    def workers(self) -> list[WorkerInfo]:
        """The workers of this pool that are registered now."""
        pids = set(self.pids)
        mine = [worker for worker in self.broker.info().workers if worker.status.get("pid") in pids]
        self._was_ready.update(worker.status["pid"] for worker in mine if worker.status.get("state") == "running")
        return mine

    def check(self) -> None:
        """Pass on what the workers say, and start crashed ones again; raises when none is left or none can work."""
        if not self._embedded.running:
            raise BrokerUnreachableError("the private broker has ended, with all that was in it: run the command again")
        for number, worker in enumerate(self._workers, start=1):
            status = worker.ended()
            for line in worker.new_lines():
                if not line.startswith(ERROR_PREFIX):
                    print(f"worker {number}: {line}", file=sys.stderr)
            if status is not None:
                self._mourn(number, worker, status)
            worker.restart_when_due()
        if all(worker.hopeless for worker in self._workers):
            raise TokenmillError(f"no worker stays alive; the last one said: {self._workers[-1].last_words()}")

    def _mourn(self, number: int, worker: WorkerProcess, status: int) -> None:
        reason = worker.last_words() if status > 0 else ""
        if status in _FINAL and worker.pid not in self._was_ready:
            raise _FINAL[status](reason or f"a worker ended with {describe_exit(status)}")
        _logger.warning(
            "worker %d ended: %s%s; %s",
            number,
            describe_exit(status),
            f" ({reason})" if reason else "",
            "it crashed too often and stays down" if worker.hopeless else "starting it again",
        )

    def _stop(self) -> None:
        deadline = self._clock() + STOP_GRACE_S
        try:
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.kill(deadline - self._clock())
        finally:  # a second Ctrl-C cuts the waiting short, not the killing
            for worker in self._workers:
                worker.kill(0.0)
