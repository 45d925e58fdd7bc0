"""Latency and processor time by arrival rate, for several patiences of a step that is not full."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.machine import process_cpu_s
from benchmarks.result import Line, Plot, Result, Table
from benchmarks.samples import percentile, significant
from benchmarks.settings import Bench
from benchmarks.system import Served, System
from benchmarks.workload import SEED, arrivals, workload
from tokenmill.shared.errors import TokenmillError

POLICIES = {0: "real time", 50: "micro-batch", 500: "batch"}
RATES = (4.0, 10.0, 16.0, 22.0, 28.0)  # requests a second; the last ones are more than one worker can serve for long
SECONDS, ROUNDS = 3.0, 2  # of arrivals at each rate, in each round
STATUS_S = 5.0
ABOUT = (
    "Requests of the workload arrive at random (Poisson) at a given rate, at one worker that waits up to "
    "`--max-wait-ms` with a step until its slots are full. 0 serves everybody at once; waiting makes fuller batches, "
    "which cost less processor time a token, and everybody waits. What runs goes on meanwhile. The policies take turns "
    "at every rate."
)
Key = tuple[int, float]  # wait in ms, arrivals a second


@dataclass(frozen=True, slots=True)
class Run:
    """Some requests, served at one arrival rate under one policy."""

    served: Served
    cpu_s: float
    steps: int
    row_steps: int


@dataclass(frozen=True, slots=True)
class Point:
    """One arrival rate under one policy, all its runs together."""

    first_token_ms: tuple[float, float]  # p50, p95
    whole_ms: tuple[float, float]
    tokens_per_s: float
    cpu_ms_per_token: float
    rows: float  # mean of a step

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Point:
        replies = [reply for run in runs for reply in run.served.replies]
        first = [reply.ttft_ms or 0.0 for reply in replies]
        whole = [reply.e2e_ms or 0.0 for reply in replies]
        tokens = sum(run.served.output_tokens for run in runs)
        return cls(
            (percentile(first, 50), percentile(first, 95)),
            (percentile(whole, 50), percentile(whole, 95)),
            tokens / sum(run.served.seconds for run in runs),
            sum(run.cpu_s for run in runs) * 1000 / tokens,
            sum(run.row_steps for run in runs) / max(1, sum(run.steps for run in runs)),
        )


def measure(bench: Bench) -> Result:
    result = Result("fill-policy", "How long a step may wait for a fuller batch", ABOUT)
    rates = RATES[: bench.size(len(RATES), 1)]
    policies = list(POLICIES)[: bench.size(len(POLICIES), 2)]
    runs: dict[Key, list[Run]] = {(wait, rate): [] for wait in policies for rate in rates}
    with ExitStack() as stack:
        systems = {wait: stack.enter_context(_system(bench, wait)) for wait in policies}
        for number in range(min(ROUNDS, bench.rounds)):
            for rate in rates:
                for wait, system in systems.items():
                    runs[wait, rate].append(run(system, rate, bench.size(int(rate * SECONDS), 2), SEED + number))
    points = {key: Point.of(found) for key, found in runs.items()}
    result.tables.append(_table(bench, points))
    result.plots += [
        _plot("latency", "p95 of the reply, ms", {key: found.whole_ms[1] for key, found in points.items()}, points),
        _plot("processor", "processor ms per output token", {k: p.cpu_ms_per_token for k, p in points.items()}, points),
    ]
    return result


def run(system: System, rate: float, n: int, seed: int) -> Run:
    """Serve ``n`` requests that arrive at this rate."""
    pid = system.workers[0].pid
    before, cpu_s = _status(system), process_cpu_s(pid)
    served = system.serve(workload(n, seed=seed), arrivals(n, rate, seed=seed))
    cpu_s = process_cpu_s(pid) - cpu_s
    after = _status(system)
    return Run(served, cpu_s, after["steps"] - before["steps"], after["row_steps"] - before["row_steps"])


def _system(bench: Bench, wait: int) -> System:
    return System(bench.best, slots=bench.slots, threads=bench.threads, options=["--max-wait-ms", str(wait)])


def _table(bench: Bench, points: dict[Key, Point]) -> Table:
    rows = []
    for (wait, rate), found in points.items():
        latencies = (*found.first_token_ms, *found.whole_ms)
        figures = map(significant, (*latencies, found.tokens_per_s, found.rows, found.cpu_ms_per_token))
        rows.append([f"{rate:g}/s, {wait} ms ({POLICIES[wait]})", *figures])
    titles = ["arrivals, wait", "first token p50", "p95", "reply p50", "p95", "tok/s", "rows", "cpu ms/token"]
    return Table(f"Milliseconds from enqueue, {bench.best.name} backend:", titles, rows)


def _plot(name: str, label: str, heights: dict[Key, float], points: dict[Key, Point]) -> Plot:
    """One line for each policy, one point on it for each arrival rate, by the tokens per second that were served."""
    lines: list[Line] = []
    for wait in dict.fromkeys(wait for wait, _ in points):
        keys = [key for key in points if key[0] == wait]
        marks = [f"{rate:g}/s" for _, rate in keys] if not lines else []
        speeds, found = [points[key].tokens_per_s for key in keys], [heights[key] for key in keys]
        lines.append(Line(f"{wait} ms: {POLICIES[wait]}", speeds, found, marks))
    title = f"Fill policy: {label}, by throughput"
    return Plot(f"fill-policy-{name}", title, "output tokens per second", label, lines)


def _status(system: System) -> dict[str, int]:
    """What the worker says of itself once it has counted all requests so far."""
    deadline = time.monotonic() + STATUS_S
    while time.monotonic() < deadline:
        status = system.states()[0].status
        if status["requests"] >= system.n_served:
            return status
        time.sleep(0.02)
    raise TokenmillError("the worker's status does not come up to date")
