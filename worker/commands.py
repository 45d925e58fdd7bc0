"""The worker's verbs of the command line; models are imported when they run, not when they are listed."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import uuid
from typing import TYPE_CHECKING, Any

import click

from tokenmill.shared.errors import BrokerUnreachableError, UsageError
from tokenmill.shared.options import extra_option, option
from tokenmill.shared.settings import DEFAULTS, Settings
from tokenmill.worker.signals import StopSignal

if TYPE_CHECKING:
    from tokenmill.shared.broker import Broker
    from tokenmill.worker.models import LoadedModel
    from tokenmill.worker.monitor import Monitor

SWITCH_INTERVAL_S = 0.0005  # the exchange's thread gets in between while the loop's thread computes


@click.command(short_help="Run one worker on a queue.")
@option("redis")
@option("queue")
@option("frontend", type=click.Choice(["native", "rq"]))
@option("rq_serializer", type=click.Choice(["json", "pickle"]))
@option("model")
@option("backend", type=click.Choice(["auto", "fast", "numpy"]))
@option("gpu_layers", type=click.IntRange(min=-1))
@option("slots")
@option("threads")
@option("max_context")
@option("kv_memory_mib")
@option("max_step_tokens", type=click.IntRange(min=1))
@option("max_wait_ms", type=click.IntRange(min=0))
@option("checkpoint_tokens")
@option("lease_ms")
@option("reply_ttl_ms")
@option("stall_timeout_s")
@option("drain_grace_s")
@option("metrics_host")
@option("metrics_port", type=click.IntRange(0, 65535))
@extra_option("parent_pid", type=int, help="Drain and stop when this process, which started the worker, ends.")
def worker(redis: str | None, queue: str, parent_pid: int | None, **given: Any) -> int:
    """Run one worker: claim requests from a queue and generate their replies.

    SIGTERM or Ctrl-C drains: running requests finish within the grace period, the rest goes on in another worker. A
    second signal skips the wait.
    """
    if redis is None:
        raise BrokerUnreachableError("no broker is named: give --redis redis://HOST:PORT/0 or set TOKENMILL_REDIS")
    stop = StopSignal(parent_pid)
    stop.install()
    return run_worker(redis, dataclasses.replace(DEFAULTS, queue=queue, **given), stop)


def run_worker(url: str, settings: Settings, stop: StopSignal) -> int:
    """Connect, load the model and work until stopped; returns the exit code."""
    _bound_maths_threads(settings.model, settings.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    from tokenmill.shared.broker import Broker, connect
    from tokenmill.worker.models import load_model
    from tokenmill.worker.monitor import Monitor

    broker = Broker(connect(url), settings.queue)
    broker.check()
    name = _worker_name()
    with Monitor(settings, name) as monitor:
        loaded = load_model(
            settings.model,
            slots=settings.slots,
            max_context=settings.max_context,
            kv_memory_mib=settings.kv_memory_mib,
            threads=settings.threads,
            backend=settings.backend,
            gpu_layers=settings.gpu_layers,
        )
        if settings.frontend == "rq":
            return _run_jobs(url, loaded, settings, name, stop, monitor)
        return _run_requests(broker, loaded, settings, name, stop, monitor)


def _run_requests(
    broker: Broker, loaded: LoadedModel, settings: Settings, name: str, stop: StopSignal, monitor: Monitor
) -> int:
    """Serve our own queue."""
    from tokenmill.worker.loop import Worker

    present = broker.register(name, loaded.fingerprint, lease_ms=settings.lease_ms)
    if present != loaded.fingerprint:
        raise UsageError(
            f"queue {settings.queue!r} has the model {present}, this worker {loaded.fingerprint}: "
            "use another queue, or empty this one and stop its workers first"
        )
    return Worker(broker, loaded, settings, name=name, stop=stop, monitor=monitor).run()


def _run_jobs(url: str, loaded: LoadedModel, settings: Settings, name: str, stop: StopSignal, monitor: Monitor) -> int:
    """Serve a queue of RQ."""
    from tokenmill.shared.broker import connect
    from tokenmill.worker.leases import Pulse
    from tokenmill.worker.rq_worker import SlotWorker
    from tokenmill.worker.runner import Runner

    runner, pulse = Runner.of(loaded, settings, worker=name), Pulse()
    worker = SlotWorker(connect(url), runner, settings, name=name, stop=stop, pulse=pulse)
    monitor.watch(runner, pulse, worker, model=loaded.name)
    return worker.run()


def _bound_maths_threads(model: str, threads: int) -> None:
    """Bound the threads of the libraries under NumPy before it is imported; variables that the user has set stay.

    Those threads spin: beside any other busy process a worker with two of them fell from 35 to 5 tokens a second. So
    our own models divide their work themselves, among threads that sleep. llama.cpp is told its number of threads, and
    its OpenMP (GNU's) that they spin for microseconds only.
    """
    kind = model.partition(":")[0]
    divides_itself = kind in ("smollm2", "gguf", "llamacpp", "toy")
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1" if divides_itself else str(threads))
    if kind == "llamacpp":
        os.environ.setdefault("GOMP_SPINCOUNT", "300")


def _worker_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
