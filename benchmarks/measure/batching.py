"""Continuous batching against one request at a time and against static batches, in one process."""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.processes import process
from benchmarks.result import Result, Table
from benchmarks.samples import ratio, spread
from benchmarks.settings import Backend, Bench
from benchmarks.stepping import loaded
from benchmarks.workload import workload
from tokenmill.worker.engine import ContinuousBatcher

SLOTS = 32
CONTINUOUS, ONE, STATIC = f"continuous, {SLOTS} slots", "one at a time", f"static batches of {SLOTS}"
ABOUT = (
    "The engine alone, without broker and text, on the workload. A static batch takes nobody in before its last "
    "request has ended; those that ended before leave it at once, so nothing is padded. The targets are those of the "
    "NumPy backend, whose step takes nearly as long for a few rows as for many. That of the fast backend grows with "
    "its rows, so that a batch which empties loses little, and one row alone is fast."
)


def measure(bench: Bench) -> Result:
    result = Result("batching", "Continuous and static batching", ABOUT)
    rows = []
    for backend in bench.backends:
        rates = _rates(bench, backend)
        if backend.name == "numpy":
            for name, limit in ((ONE, 4.0), (STATIC, 1.4)):
                claim = f"continuous batching of {SLOTS} over {name}, NumPy backend"
                result.judge(claim, ratio(rates[CONTINUOUS], rates[name]), "at least", limit, "×")
        times = {name: str(ratio(rates[CONTINUOUS], values)) for name, values in rates.items() if name != CONTINUOUS}
        rows += [[f"{backend.name}, {name}", str(spread(rates[name])), times.get(name, "")] for name in rates]
    result.tables.append(Table("Output tokens per second:", ["", "tok/s", "times slower than continuous"], rows))
    return result


def _rates(bench: Bench, backend: Backend) -> dict[str, list[float]]:
    """Output tokens per second of each way of batching, a round after the other."""
    slow = backend.name == "numpy"
    n, few = bench.size(128 if slow else 96, 8), bench.size(4 if slow else 8, 2)
    rates: dict[str, list[float]] = defaultdict(list)
    with process() as run:
        for _ in range(1 if slow else bench.rounds):
            for name, requests, slots, group in (
                (CONTINUOUS, n, SLOTS, n),
                (STATIC, n, SLOTS, SLOTS),
                (ONE, few, 1, few),
            ):
                rates[name].append(run(rate, backend, bench.threads, requests, slots, group))
    return rates


def rate(backend: Backend, threads: int, requests: int, slots: int, group: int) -> float:
    """Output tokens per second of groups that are served one after the other; runs in a process of its own."""
    model = loaded(backend, threads, SLOTS)
    assert model.tokenizer is not None
    batcher = ContinuousBatcher(model.model, slots, max_step_tokens="auto")
    batcher.submit([5], max_tokens=2)
    batcher.run()
    work = [(model.tokenizer.encode(request.prompt), request.n_output) for request in workload(requests)]
    start = time.perf_counter()
    for first in range(0, requests, group):
        for prompt, length in work[first : first + group]:
            batcher.submit(prompt, max_tokens=length, ignore_eos=True)
        batcher.run()
    return sum(length for _, length in work) / (time.perf_counter() - start)
