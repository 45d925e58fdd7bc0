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
    "reader's hands. Added is what was not inside the model's call; of that, the engine's part (tokenisation, "
    "scheduling, sampling, text) would be there without a queue as well, and the rest is queue, claim and reply."
)


def measure(bench: Bench) -> Result:
    result = Result("first-token", "From idle to the first token", ABOUT)
    backends = [bench.best] if bench.best.name == TOY else [Backend(TOY, TOY), bench.best]
    rows = []
    for backend in backends:
        call, engine, queue = _sample(bench, backend)
        added = [sum(parts) for parts in zip(engine, queue, strict=True)]
        figures = [percentile(times, 50) for times in (call, engine, queue, added)]
        rows.append([backend.name, str(len(added)), *map(significant, [*figures, percentile(added, 99), max(added)])])
        for what, times in (("queue, claim and reply", queue), ("all but the model's call", added)):
            for percent, limit in ((50, 2.0), (99, 10.0)):
                claim = f"added before the first token by {what}, p{percent}, {backend.name}"
                result.judge(claim, percentile(times, percent), "at most", limit, " ms")
    titles = ["backend", "requests", "model call, p50", "engine, p50", "queue, claim and reply, p50"]
    titles += ["all added, p50", "p99", "longest"]
    result.tables.append(Table("Milliseconds:", titles, rows))
    return result


def _sample(bench: Bench, backend: Backend) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each request: of the model's call, of the engine around it, and of the rest."""
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
    step = (calls[first, 5] - calls[first, 4]) * 1000
    whole = np.array([answered - asked for asked, answered in spans]) * 1000
    return inside.tolist(), (step - inside).tolist(), (whole - step).tolist()


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
