"""What the NumPy model gives in batches of 1 to 64, and what static batching of 32 gives beside it.

Prints output tokens per second over the turns of the MT-bench questions, with output lengths from a seeded exponential
distribution and EOS ignored. Exit code 1 when a target is missed, 2 when the questions are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.shared.errors import TokenmillError, UsageError
from tokenmill.worker.engine import ContinuousBatcher, Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.tokenizer import Tokenizer

MEAN_OUTPUT, MAX_OUTPUT, SEED = 48, 192, 7
MAX_STEP_TOKENS = 512
TARGETS = {"B = 1": 4.0, "static batching of 32": 1.4}  # continuous batching of 32 over each


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its prompt, and how many tokens it is made to generate."""

    prompt: list[int]
    n_output: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, default=Path("../shared/data/mt_bench_questions.jsonl"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=256)
    options = parser.parse_args()
    try:
        if not options.questions.is_file():
            raise UsageError(f"no questions at {options.questions}; give a JSON Lines file of {{'turns': [TEXT, …]}}")
        loaded = load_model(options.model, slots=64)
        if loaded.tokenizer is None:
            raise UsageError(f"the model {options.model} has no tokenizer for the questions")
    except TokenmillError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    work = workload(loaded.tokenizer, options.questions, options.requests)
    print(machine())
    n_prompt, n_output = (sum(counts) for counts in zip(*((len(w.prompt), w.n_output) for w in work), strict=True))
    print(f"{len(work)} requests: {n_prompt} prompt, {n_output} output tokens")
    run(loaded.model, work[:4], 4)  # warm up
    few = work[: max(1, len(work) // 16)]
    rates = {"B = 1": run(loaded.model, few, 1), "B = 32": run(loaded.model, work, 32)}
    rates["static batching of 32"] = run(loaded.model, work, 32, static=True)
    for capacity in (8, 64):  # what is compared ran first, one after the other: the machine's load may change
        run(loaded.model, work, capacity)
    return report(rates)


def workload(tokenizer: Tokenizer, questions: Path, n: int) -> list[Work]:
    """The turns of the questions in order, each asked on its own, again and again until there are ``n``."""
    turns = [turn for line in questions.read_text().splitlines() for turn in json.loads(line)["turns"]]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns]
    lengths = np.random.default_rng(SEED).exponential(MEAN_OUTPUT, n).clip(1, MAX_OUTPUT).astype(int)
    return [Work(prompts[i % len(prompts)], int(length)) for i, length in enumerate(lengths)]


def run(model: Model, work: list[Work], capacity: int, *, static: bool = False) -> float:
    """Output tokens per second; ``static`` lets the last request of a batch finish before the next batch begins."""
    batcher = ContinuousBatcher(model, capacity, max_step_tokens=MAX_STEP_TOKENS)
    groups = [work[i : i + capacity] for i in range(0, len(work), capacity)] if static else [work]
    start, n_output = time.perf_counter(), 0
    for group in groups:
        for request in group:
            batcher.submit(request.prompt, max_tokens=request.n_output, ignore_eos=True)
        n_output += sum(finished.n_generated for finished in batcher.run())
    seconds = time.perf_counter() - start
    name = f"{'static' if static else 'continuous'}, B = {capacity}"
    print(f"{name:20} {len(work):4} requests {seconds:6.1f} s {n_output / seconds:7.1f} output tok/s", flush=True)
    return n_output / seconds


def report(rates: dict[str, float]) -> int:
    """Print the ratios that matter; 1 when a target is missed."""
    missed = False
    for name, target in TARGETS.items():
        ratio = rates["B = 32"] / rates[name]
        missed |= ratio < target
        print(
            f"continuous batching of 32 over {name}: {ratio:.2f} ({'FAIL' if ratio < target else 'PASS'}: ≥ {target})"
        )
    return int(missed)


def machine() -> str:
    """Cores and the linear algebra under NumPy, which decide the figures; other load makes many threads a burden."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "all")
    library = f"{blas['name']} {blas['version']}, threads: {threads}"
    return f"{platform.machine()}, {cores} cores{load}, NumPy {np.__version__} with {library}"


if __name__ == "__main__":
    sys.exit(main())
