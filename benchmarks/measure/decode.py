"""Tokens per second of the model alone, by the number of sequences that it decodes together."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from functools import lru_cache
from importlib.util import find_spec

import numpy as np

from benchmarks import llama_cpp
from benchmarks.environments import PeerError
from benchmarks.processes import process
from benchmarks.result import Line, Plot, Result, Table
from benchmarks.samples import ratio, spread
from benchmarks.settings import LLAMACPP, TOY, Backend, Bench
from tokenmill.worker.engine import Batch
from tokenmill.worker.engine.model import Model
from tokenmill.worker.models.registry import smollm2_path

SIZES = (1, 8, 32, 64, 128)
PREFIX, MOST_STEPS, FEWEST_STEPS, ENOUGH_S = 64, 32, 3, 0.7
PREFILL_TOKENS = 512
LLAMA_CPP_MOST = 32  # sequences: with more, its prefill alone would take half a minute
LLAMA_BENCH = "llama-bench, one sequence"
ABOUT = (
    f"Bare model calls, without engine, sampling or broker: every sequence has {PREFIX} tokens before and makes up to "
    f"{MOST_STEPS} more, chosen greedily. `llama-bench` is measured in the same rounds, on the same file; `llamacpp` "
    "is llama.cpp behind our interface."
)
Key = tuple[str, int]  # backend, threads


def measure(bench: Bench) -> Result:
    sizes = SIZES[: bench.size(len(SIZES), 2)]
    threads = (1, bench.threads)[: bench.size(2, 1)]
    rates: dict[tuple[Key, int], list[float]] = defaultdict(list)
    single: dict[int, list[float]] = defaultdict(list)
    result = Result("decode", "Decoding by batch size", ABOUT)
    contenders = [(backend, n, sizes) for backend in bench.backends for n in threads] + _llama_cpp(bench, sizes)
    with ExitStack() as stack:
        runners = [stack.enter_context(process()) for _ in contenders]
        for _ in range(bench.rounds):
            for run, (backend, n, feasible) in zip(runners, contenders, strict=True):
                for size in feasible:
                    rates[(backend.name, n), size].append(run(step_rate, backend, n, max(feasible), size))
            if bench.best.name != TOY:
                _llama_bench(bench, threads, single, result)
    _tabulate(result, sizes, rates, single)
    _judge(result, bench, sizes, rates, single)
    return result


def _llama_cpp(bench: Bench, sizes: tuple[int, ...]) -> list[tuple[Backend, int, tuple[int, ...]]]:
    """The backend for architectures that the others cannot compute, on the same file."""
    if bench.best.name == TOY or not find_spec("llama_cpp"):
        return []
    backend = Backend(LLAMACPP, f"llamacpp:{smollm2_path()}")
    return [(backend, bench.threads, tuple(size for size in sizes if size <= LLAMA_CPP_MOST))]


def step_rate(backend: Backend, threads: int, n_contexts: int, size: int) -> float:
    """Tokens per second of one step after the other with ``size`` sequences; runs in a process of its own."""
    model = _prefilled(backend, threads, n_contexts)
    tokens, start, steps = np.full(size, 5, np.int32), time.perf_counter(), 0
    while steps < FEWEST_STEPS or (steps < MOST_STEPS and time.perf_counter() - start < ENOUGH_S):
        tokens = model.forward(_batch(tokens, 0, PREFIX + steps, 1)).argmax(axis=1).astype(np.int32)
        steps += 1
    return size * steps / (time.perf_counter() - start)


@lru_cache
def _prefilled(backend: Backend, threads: int, n_contexts: int) -> Model:
    model = backend.load(slots=n_contexts, threads=threads, max_context=2 * PREFIX).model
    prompt = np.random.default_rng(0).integers(0, model.vocab_size or 2, PREFIX).astype(np.int32)
    at_once = PREFILL_TOKENS // PREFIX
    for first in range(0, n_contexts, at_once):
        n = min(at_once, n_contexts - first)
        model.forward(_batch(np.tile(prompt, n), first, 0, PREFIX))
    model.forward(_batch(np.zeros(n_contexts, np.int32), 0, PREFIX, 1))
    return model


def _batch(tokens: np.ndarray, first: int, start: int, length: int) -> Batch:
    n = len(tokens) // length
    contexts = np.arange(first, first + n, dtype=np.int32)
    return Batch(contexts, np.full(n, start, np.int32), np.full(n, length, np.int32), tokens, np.ones(n, np.bool_))


def _llama_bench(bench: Bench, threads: tuple[int, ...], single: dict[int, list[float]], result: Result) -> None:
    for n in threads:
        try:
            single[n].append(
                llama_cpp.single_stream(smollm2_path(), threads=n, tokens=MOST_STEPS, depth=PREFIX, folder=bench.peers)
            )
        except PeerError as error:
            if str(error) not in result.notes:
                result.notes.append(str(error))


def _tabulate(
    result: Result,
    sizes: tuple[int, ...],
    rates: dict[tuple[Key, int], list[float]],
    single: dict[int, list[float]],
) -> None:
    rows, lines = [], []
    for name, n in dict.fromkeys(key for key, _ in rates):
        found = {size: spread(rates[(name, n), size]) for size in sizes if ((name, n), size) in rates}
        rows.append([f"{name}, {_threads(n)}", *map(str, found.values()), *[""] * (len(sizes) - len(found))])
        lines.append(Line(rows[-1][0], list(map(float, found)), [one.value for one in found.values()]))
    for n, values in single.items():
        if values:
            rows.append([f"{LLAMA_BENCH}, {_threads(n)}", str(spread(values)), *[""] * (len(sizes) - 1)])
    result.tables.append(Table("Tokens per second:", ["", *(f"B = {size}" for size in sizes)], rows))
    result.plots.append(Plot("decode", "Decoding by batch size", "sequences", "tokens per second", lines, log=True))


def _judge(
    result: Result,
    bench: Bench,
    sizes: tuple[int, ...],
    rates: dict[tuple[Key, int], list[float]],
    single: dict[int, list[float]],
) -> None:
    claim = "single stream (B = 1) of the fast backend over llama.cpp's"
    fast = rates.get((("fast", bench.threads), 1))
    theirs = single.get(bench.threads)
    if fast and theirs:
        result.judge(claim, ratio(fast, theirs), "at least", 1.3, "×")
    else:
        result.cannot_judge(claim, "at least", 1.3, "×")
    claim = "decoding of the NumPy backend over its own B = 1, best batch size"
    key = ("numpy", bench.threads)
    if numpy := {size: rates[key, size] for size in sizes if (key, size) in rates}:
        best = max(numpy.values(), key=lambda values: spread(values).value)
        result.judge(claim, ratio(best, numpy[1]), "at least", 12.0, "×")
    else:
        result.cannot_judge(claim, "at least", 12.0, "×")


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
