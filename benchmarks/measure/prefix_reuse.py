"""Requests that begin alike, and requests that do not."""

from __future__ import annotations

import numpy as np

from benchmarks.result import Result, Table
from benchmarks.samples import ratio, spread
from benchmarks.settings import Bench
from benchmarks.system import System
from benchmarks.workload import Work, prompt

REQUESTS, SHARED_WORDS, OWN_WORDS, N_OUTPUT = 64, 285, 12, 32
ABOUT = (
    f"{REQUESTS} requests at once, each with a beginning of about 300 tokens, {OWN_WORDS} words of its own and "
    f"{N_OUTPUT} output tokens: with one beginning for all, and with another for each. Nobody has asked before."
)


def measure(bench: Bench) -> Result:
    n = bench.size(REQUESTS, 6)
    result = Result("prefix-reuse", "A beginning that requests share", ABOUT)
    rates: dict[str, list[float]] = {"shared": [], "different": []}
    tokens: dict[str, float] = {}
    for _ in range(bench.rounds):
        for kind, values in rates.items():
            with System(bench.best, slots=bench.slots, threads=bench.threads) as system:
                served = system.serve(_work(n, shared=kind == "shared"))
            values.append(n / served.seconds)
            tokens[kind] = sum(reply.usage.prompt_tokens for reply in served.replies) / n
    rows = [[kind, f"{tokens[kind]:.0f}", str(spread(values))] for kind, values in rates.items()]
    titles = ["beginnings", "prompt tokens", "requests/s"]
    result.tables.append(Table(f"Throughput, {bench.best.name} backend:", titles, rows))
    claim = "throughput with a shared beginning of 300 tokens over that with different ones"
    result.judge(claim, ratio(rates["shared"], rates["different"]), "at least", 2.0, "×")
    return result


def _work(n: int, *, shared: bool) -> list[Work]:
    rng = np.random.default_rng(11)
    beginnings = [prompt(rng, SHARED_WORDS) for _ in range(n)]
    return [Work(f"{beginnings[0 if shared else i]} {prompt(rng, OWN_WORDS)}", N_OUTPUT) for i in range(n)]
