"""Latency and processor time by arrival rate, for several patiences of a step that is not full."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.machine import process_cpu_s
from benchmarks.result import Line, Plot, Result, Table
from benchmarks.samples import percentile, significant
from benchmarks.settings import Bench
from benchmarks.system import System
from benchmarks.workload import arrivals, workload
from tokenmill.shared.errors import TokenmillError

POLICIES = {0: "real time", 50: "micro-batch", 500: "batch"}
RATES = (2.0, 6.0, 12.0, 18.0)
SECONDS = 5.0  # of arrivals at each rate
STATUS_S = 5.0
ABOUT = (
    "Requests of the workload arrive at random (Poisson) at a given rate, at one worker that waits up to "
    "`--max-wait-ms` with a step until its slots are full. 0 serves everybody at once; waiting makes fuller batches, "
    "which cost less processor time a token, and everybody waits."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One arrival rate under one policy."""

    first_token_ms: tuple[float, float]  # p50, p95
    whole_ms: tuple[float, float]
    tokens_per_s: float
    cpu_ms_per_token: float
    rows: float  # mean of a step


def measure(bench: Bench) -> Result:
    result = Result("fill-policy", "How long a step may wait for a fuller batch", ABOUT)
    rates = RATES[: bench.size(len(RATES), 1)]
    policies = list(POLICIES)[: bench.size(len(POLICIES), 2)]
    points = {}
    for wait in policies:
        options = ["--max-wait-ms", str(wait)]
        with System(bench.best, slots=bench.slots, threads=bench.threads, options=options) as system:
            for rate in rates:
                points[wait, rate] = point(system, rate, bench.size(int(rate * SECONDS), 2))
    rows = []
    for (wait, rate), found in points.items():
        latencies = (*found.first_token_ms, *found.whole_ms)
        figures = map(significant, (*latencies, found.tokens_per_s, found.rows, found.cpu_ms_per_token))
        rows.append([f"{rate:g}/s, {wait} ms ({POLICIES[wait]})", *figures])
    titles = ["arrivals, wait", "first token p50", "p95", "reply p50", "p95", "tok/s", "rows", "cpu ms/token"]
    result.tables.append(Table(f"Milliseconds from enqueue, {bench.best.name} backend:", titles, rows))
    speeds = {wait: [points[wait, rate].tokens_per_s for rate in rates] for wait in policies}
    latency = {wait: [points[wait, rate].whole_ms[1] for rate in rates] for wait in policies}
    cost = {wait: [points[wait, rate].cpu_ms_per_token for rate in rates] for wait in policies}
    for name, label, heights in (
        ("latency", "p95 of the reply, ms", latency),
        ("processor", "processor ms per output token", cost),
    ):
        lines = [Line(f"{wait} ms: {POLICIES[wait]}", speeds[wait], heights[wait]) for wait in policies]
        title = f"Fill policy: {label}"
        result.plots.append(Plot(f"fill-policy-{name}", title, "output tokens per second", label, lines))
    return result


def point(system: System, rate: float, n: int) -> Point:
    """Serve ``n`` requests that arrive at this rate."""
    pid = system.workers[0].pid
    before, cpu_s = _status(system), process_cpu_s(pid)
    served = system.serve(workload(n), arrivals(n, rate))
    cpu_s = process_cpu_s(pid) - cpu_s
    after = _status(system)
    first = [reply.ttft_ms or 0.0 for reply in served.replies]
    whole = [reply.e2e_ms or 0.0 for reply in served.replies]
    steps = max(1, after["steps"] - before["steps"])
    return Point(
        (percentile(first, 50), percentile(first, 95)),
        (percentile(whole, 50), percentile(whole, 95)),
        served.rate,
        cpu_s * 1000 / served.output_tokens,
        (after["row_steps"] - before["row_steps"]) / steps,
    )


def _status(system: System) -> dict[str, int]:
    """What the worker says of itself once it has counted all requests so far."""
    deadline = time.monotonic() + STATUS_S
    while time.monotonic() < deadline:
        status = system.states()[0].status
        if status["requests"] >= system.n_served:
            return status
        time.sleep(0.02)
    raise TokenmillError("the worker's status does not come up to date")
