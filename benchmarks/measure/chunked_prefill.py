"""What a long prompt does to those who are decoding."""

from __future__ import annotations

from benchmarks.processes import process
from benchmarks.result import Result, Table
from benchmarks.samples import percentile, significant
from benchmarks.settings import Backend, Bench
from benchmarks.stepping import decoding, loaded, step_ms, timed_step, tokens
from tokenmill.worker.engine import StepLimit

ROWS, PROMPT_TOKENS, LONG_PROMPT = 32, 48, 1500
CHUNKS = (64, 128, 256, 512)
DEFAULT: StepLimit = "auto"
ABOUT = (
    f"{ROWS} rows decode; then a prompt of {LONG_PROMPT:,} tokens arrives, several times, each time another. Disturbed "
    "are the steps from its arrival to its first token. A step's tokens, decoding rows and prefill together, are "
    "bounded by `--max-step-tokens`, by the batcher itself, or not at all."
)


def measure(bench: Bench) -> Result:
    result = Result("chunked-prefill", "A long prompt among decoding rows", ABOUT)
    long = bench.size(LONG_PROMPT, 200)
    limits: tuple[StepLimit, ...] = (None, DEFAULT, *CHUNKS[: bench.size(len(CHUNKS), 0)])
    rows = []
    for backend in bench.backends:
        with process() as run:
            for limit in limits:
                arrivals = bench.size(1 if backend.name == "numpy" or limit is None else 4, 1)
                quiet, disturbed = run(
                    inter_token_ms, backend, bench.threads, limit, long, arrivals, bench.size(100, 10)
                )
                p99 = percentile(quiet, 99)
                times = percentile(disturbed, 99) / p99
                shown = (percentile(quiet, 50), p99, percentile(disturbed, 99), max(disturbed), times)
                name = {None: "no bound", DEFAULT: "by itself (the default)"}.get(limit, f"{limit} tokens a step")
                prefill_ms = significant(sum(disturbed) / arrivals)
                rows.append([f"{backend.name}, {name}", *map(significant, shown), prefill_ms])
                if limit == DEFAULT:
                    claim = f"inter-token p99 while a {LONG_PROMPT:,}-token prompt arrives, {backend.name} backend"
                    result.judge(claim, times, "at most", 2.5, "×")
    titles = ["", "undisturbed p50", "p99", "disturbed p99", "longest", "times p99", "to the prompt's first token"]
    caption = "Milliseconds between two tokens of a decoding row:"
    result.tables.append(Table(caption, titles, rows))
    return result


def inter_token_ms(
    backend: Backend, threads: int, limit: StepLimit, n_long: int, arrivals: int, steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of undisturbed and of disturbed steps; runs in a process of its own."""
    model = loaded(backend, threads, ROWS + 1)
    batcher = decoding(model, ROWS, PROMPT_TOKENS, max_step_tokens=limit)
    step_ms(batcher, 3)
    quiet: list[float] = []
    disturbed: list[float] = []
    for seed in range(arrivals):
        quiet += step_ms(batcher, max(1, steps // arrivals))
        long = batcher.submit(tokens(model, n_long, seed=1000 + seed), max_tokens=1, ignore_eos=True)
        answered: set[int] = set()
        while long not in answered:
            ms, handles = timed_step(batcher)
            disturbed.append(ms)
            answered.update(handles)
    return quiet, disturbed
