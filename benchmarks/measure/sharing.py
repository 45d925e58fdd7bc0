"""Two workers beside each other, and workers beside a process that never rests."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.processes import process
from benchmarks.result import Result, Table
from benchmarks.samples import percentile, ratio, significant, spread
from benchmarks.settings import Backend, Bench
from benchmarks.stepping import decoding, loaded, step_ms
from benchmarks.system import System
from benchmarks.workload import workload

ROWS, PROMPT_TOKENS = 32, 48
ABOUT = (
    "Two workers with one thread each against one with two threads, each with as many slots, on the same requests "
    f"from enqueue to reply. Then the steps of a batcher with {ROWS} decoding rows, alone and beside a process that "
    "computes without pause: a stall is a step far longer than a fair share of the "
    "processor would make it."
)
MOST_STRETCH = 3.0


def measure(bench: Bench) -> Result:
    result = Result("sharing", "Sharing the processor", ABOUT)
    _workers(bench, result)
    rows = []
    for backend in bench.backends:
        for threads in (1, bench.threads):
            rows.append(_steps(bench, backend, threads, result))
    titles = ["", "alone: p50", "p99", "longest", "beside a busy process: p50", "p99", "longest"]
    result.tables.append(Table(f"Milliseconds of a step with {ROWS} rows:", titles, rows))
    return result


def _workers(bench: Bench, result: Result) -> None:
    rates: dict[tuple[int, int], list[float]] = defaultdict(list)
    work = workload(bench.size(128, 8))
    for _ in range(bench.rounds):
        for workers, threads in ((1, 2), (2, 1)):
            with System(bench.best, slots=bench.slots, threads=threads, workers=workers) as system:
                rates[workers, threads].append(system.serve(work).rate)
    one, two = rates[1, 2], rates[2, 1]
    rows = [["one worker, 2 threads", str(spread(one))], ["two workers, 1 thread each", str(spread(two))]]
    result.tables.append(Table(f"Output tokens per second, {bench.best.name} backend:", ["", "tok/s"], rows))
    result.judge("throughput of two workers of one thread over one of two", ratio(two, one), "at least", 0.9, "×")


def _steps(bench: Bench, backend: Backend, threads: int, result: Result) -> list[str]:
    alone: list[float] = []
    beside: list[float] = []
    steps = bench.size(20 if backend.name == "numpy" else 60, 10)
    with process() as run:
        run(decode_steps, backend, threads, 3)
        for _ in range(bench.rounds):
            alone += run(decode_steps, backend, threads, steps)
            with busy_process():
                beside += run(decode_steps, backend, threads, steps)
    p99, disturbed = percentile(alone, 99), percentile(beside, 99)
    name = f"{backend.name}, {threads} thread{'s' * (threads > 1)}"
    claim = f"p99 of a step beside a busy process over that alone, {name}"
    result.judge(claim, disturbed / p99, "at most", MOST_STRETCH, "×")
    figures = (percentile(alone, 50), p99, max(alone), percentile(beside, 50), disturbed, max(beside))
    return [name, *map(significant, figures)]


def decode_steps(backend: Backend, threads: int, steps: int) -> list[float]:
    """Milliseconds of steps; runs in a process of its own."""
    batcher = decoding(loaded(backend, threads, ROWS + 1), ROWS, PROMPT_TOKENS)
    step_ms(batcher, 3)
    return step_ms(batcher, steps)


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes for as long as the block runs."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
