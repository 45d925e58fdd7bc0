"""Time to the first token of a request that finds an idle worker, over the bare model call."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.result import Result, Table
from benchmarks.samples import percentile, significant
from benchmarks.settings import TOY, Backend, Bench
from benchmarks.system import System, timed_argv
from benchmarks.workload import prompt

LONGEST_PAUSE_S = 0.02  # between two requests, drawn anew, so that no rhythm of the worker is hit
WORDS = 12
ABOUT = (
    "One streaming request after another, each to an idle worker, from the call of `submit` to its first token in the "
    "reader's hands; of that, what was not inside the model's call: enqueue, wake-up, claim, tokenisation, sampling, "
    "text and the way back."
)


def measure(bench: Bench) -> Result:
    result = Result("first-token", "From idle to the first token", ABOUT)
    backends = [bench.best] if bench.best.name == TOY else [Backend(TOY, TOY), bench.best]
    rows = []
    for backend in backends:
        call, added = _sample(bench, backend)
        p50, p99 = percentile(added, 50), percentile(added, 99)
        rows.append([backend.name, str(len(added)), *map(significant, (percentile(call, 50), p50, p99, max(added)))])
        result.judge(f"added before the first token, p50, {backend.name}", p50, "at most", 2.0, " ms")
        result.judge(f"added before the first token, p99, {backend.name}", p99, "at most", 10.0, " ms")
    titles = ["backend", "requests", "model call, p50", "added, p50", "added, p99", "added, longest"]
    result.tables.append(Table("Milliseconds:", titles, rows))
    return result


def _sample(bench: Bench, backend: Backend) -> tuple[list[float], list[float]]:
    """Milliseconds of the model's call, and those that came on top, of each request."""
    n, rng = bench.size(300, 5), np.random.default_rng(3)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "calls.npy"
        with System(backend, slots=8, threads=bench.threads, argv=timed_argv(trace)) as system:
            spans = []
            for _ in range(n):
                time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
                spans.append(_ask(system, prompt(rng, WORDS)))
        calls = np.load(trace)
    first = np.searchsorted(calls[:, 0], [asked for asked, _ in spans])
    inside = (calls[first, 1] - calls[first, 0]) * 1000
    whole = np.array([answered - asked for asked, answered in spans]) * 1000
    return inside.tolist(), (whole - inside).tolist()


def _ask(system: System, text: str) -> tuple[float, float]:
    """When a request was submitted, and when its first token was read."""
    client = system.client
    asked = time.perf_counter()
    request_id = client.submit(text, max_tokens=2, ignore_eos=True, stream=True)
    while not client.broker.read_tokens(request_id, "0", block_ms=1000):
        pass
    answered = time.perf_counter()
    client.wait(request_id)
    return asked, answered
