"""The part of a step that engine and broker take."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import Result, Table
from benchmarks.samples import percentile, significant, spread
from benchmarks.settings import Backend, Bench
from benchmarks.system import System, timed_argv
from benchmarks.workload import workload
from tokenmill.shared.errors import TokenmillError

SLOTS = 32
FULL = 0.9  # share of the slots that are busy in the steps that count
ABOUT = (
    f"A worker with {SLOTS} slots serves the workload from a full queue and writes down when each call of its model "
    "begins and ends. From one begin to the next is a step; what of it is not inside the call is scheduling, sampling, "
    "text, replies, checkpoints, claims and waiting for the broker. Steps count while at least nine slots of ten are "
    "busy."
)


def measure(bench: Bench) -> Result:
    result = Result("overhead", "What engine and broker take of a step", ABOUT)
    rows = []
    for backend in bench.backends:
        shares, between, inside = [], [], []
        for _ in range(1 if backend.name == "numpy" else bench.rounds):
            step, call = step_seconds(_trace(bench, backend))
            shares.append(float((step - call).sum() / step.sum() * 100))
            between += ((step - call) * 1000).tolist()
            inside += (call * 1000).tolist()
        figures = [percentile(inside, 50), percentile(between, 50), percentile(between, 99)]
        rows.append([backend.name, *map(significant, figures), str(spread(shares))])
        if backend.name == "fast":
            claim = f"engine and broker's part of a step at B = {SLOTS}, fast backend"
            result.judge(claim, spread(shares), "at most", 5.0, " %")
    titles = ["backend", "call, p50", "outside, p50", "outside, p99", "part of a step, %"]
    result.tables.append(Table("Milliseconds inside and outside the model's call:", titles, rows))
    return result


def _trace(bench: Bench, backend: Backend) -> NDArray[np.float64]:
    """Calls of one worker: begin, end, rows, tokens."""
    few = bench.size(48 if backend.name == "numpy" else 96, 40)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "calls.npy"
        argv = timed_argv(trace)
        with System(backend, slots=SLOTS, threads=bench.threads, argv=argv) as system:
            system.serve(workload(few))
        calls: NDArray[np.float64] = np.load(trace)
    return calls


def step_seconds(calls: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of each step and of the call in it, while nearly all slots were busy before and after."""
    begin, end, rows = calls[:, 0], calls[:, 1], calls[:, 2]
    full = rows >= FULL * rows.max()
    both = full[:-1] & full[1:]
    if not both.any():
        raise TokenmillError("the slots were never busy for two steps: serve more requests")
    return (begin[1:] - begin[:-1])[both], (end[:-1] - begin[:-1])[both]
