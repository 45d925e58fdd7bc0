"""Ordinary RQ jobs, in the slots of one worker and one after another, on the same model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis
from rq import Queue, Worker
from rq.serializers import JSONSerializer

from benchmarks.result import Result, Table
from benchmarks.samples import ratio, spread
from benchmarks.settings import Bench
from benchmarks.simple_rq_worker import JOB
from benchmarks.workload import Work, workload
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.jobs import GENERATE

SLOTS = 8
OURS, SIMPLE = f"tokenmill worker --frontend rq, {SLOTS} slots", "RQ's SimpleWorker"
READY_S, DONE_S, POLL_S = 120.0, 600.0, 0.02
ABOUT = (
    "The same RQ jobs, enqueued by RQ's own client: in the slots of one worker, and run by RQ's SimpleWorker, which "
    "calls a function that generates with the same model. Both have the same threads; the clock runs from the first "
    "enqueue to the last result."
)


def measure(bench: Bench) -> Result:
    result = Result("rq", "RQ jobs in slots", ABOUT)
    many, few = workload(bench.size(96, 8)), workload(bench.size(24, 3))
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(bench.rounds):
        rates[OURS].append(_rate(_ours(bench), GENERATE, many))
        rates[SIMPLE].append(_rate(_simple(bench), JOB, few))
    rows = [[name, str(spread(values))] for name, values in rates.items()]
    result.tables.append(Table(f"Output tokens per second, {bench.best.name} backend:", ["", "tok/s"], rows))
    claim = f"RQ jobs in {SLOTS} slots over RQ's SimpleWorker"
    result.judge(claim, ratio(rates[OURS], rates[SIMPLE]), "at least", 1.0, "×")
    return result


def _ours(bench: Bench) -> list[str]:
    options = ["--slots", str(SLOTS), "--threads", str(bench.threads), *bench.best.options()]
    return [
        "-m",
        "tokenmill.shared.cli",
        "-q",
        "worker",
        "--frontend",
        "rq",
        "--redis",
        "URL",
        "--queue",
        "QUEUE",
        *options,
    ]


def _simple(bench: Bench) -> list[str]:
    return ["-m", "benchmarks.simple_rq_worker", "URL", "QUEUE", bench.best.model, bench.best.name, str(bench.threads)]


def _rate(command: Sequence[str], job: str, work: Sequence[Work]) -> float:
    """Output tokens per second of one worker."""
    with EmbeddedBroker() as embedded, redis.Redis.from_url(embedded.url) as client:
        queue = Queue("bench", connection=client, serializer=JSONSerializer)
        with _worker(command, embedded.url, queue):
            _serve(queue, job, workload(SLOTS, seed=0)[:2])  # what is compiled and cached at the first use
            begin = time.perf_counter()
            _serve(queue, job, work)
            return sum(request.n_output for request in work) / (time.perf_counter() - begin)


@contextmanager
def _worker(command: Sequence[str], url: str, queue: Queue) -> Iterator[None]:
    filled_in = [{"URL": url, "QUEUE": queue.name}.get(part, part) for part in command]
    process = subprocess.Popen([sys.executable, *filled_in])
    try:
        _wait(lambda: bool(Worker.all(queue=queue)), READY_S)
        yield
    finally:
        process.kill()
        process.wait()


def _serve(queue: Queue, job: str, work: Sequence[Work]) -> None:
    extra = {"ignore_eos": True} if job == GENERATE else {}
    before = len(queue.finished_job_registry)
    for request in work:
        queue.enqueue_call(job, args=[request.prompt], kwargs={"max_tokens": request.n_output, **extra})
    _wait(lambda: len(queue.finished_job_registry) == before + len(work), DONE_S)


def _wait(condition: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TokenmillError("the RQ worker was not ready, or not done, in time")
        time.sleep(POLL_S)
