"""The same greedy requests in batches of every size."""

from __future__ import annotations

from benchmarks.processes import process
from benchmarks.result import Result, Table
from benchmarks.settings import Backend, Bench
from benchmarks.stepping import loaded
from benchmarks.workload import workload
from tokenmill.worker.engine import ContinuousBatcher

SLOTS = (1, 8, 16, 32, 64, 96)
TIE = 1e-3  # difference of two logits below which either token is right
ABOUT = (
    "Greedy outputs of the same requests at several slot counts, against those with one slot. Where a float model "
    f"differs, its two best tokens must have been within {TIE:g} of each other at the first token that differs."
)
Output = list[tuple[int, float]]  # token, and how far the best was ahead of the second


def measure(bench: Bench) -> Result:
    result = Result("slot-counts", "The same output at every slot count", ABOUT)
    slots = SLOTS[: bench.size(len(SLOTS), 2)]
    rows = []
    for backend in bench.backends:
        n, longest = (32, 12) if backend.name == "numpy" else (96, 32)
        with process() as run:
            outputs = {
                count: run(greedy, backend, bench.threads, count, bench.size(n, 4), bench.size(longest, 3))
                for count in slots
            }
        alone = outputs[1]
        same = {k: sum(tokens_of(a) == tokens_of(b) for a, b in zip(alone, outputs[k], strict=True)) for k in slots}
        gaps = [gap for k in slots for a, b in zip(alone, outputs[k], strict=True) if (gap := gap_at(a, b)) is not None]
        rows.append([backend.name, str(len(alone)), *(str(same[k]) for k in slots), f"{max(gaps, default=0):.1g}"])
        claim = f"greedy outputs at every slot count, {backend.name} backend"
        if backend.name == "numpy":
            measured = f"{len(gaps)} differ, within {max(gaps, default=0):.1g}"
            result.require(claim, f"the same but for ties within {TIE:g}", measured, max(gaps, default=0) <= TIE)
        else:
            result.require(claim, "the same tokens", f"{len(gaps)} differ", not gaps)
    titles = ["backend", "requests", *(f"{k} slots" for k in slots), "largest gap"]
    result.tables.append(Table("Requests whose output is that of one slot:", titles, rows))
    return result


def greedy(backend: Backend, threads: int, slots: int, n: int, longest: int) -> list[Output]:
    """Outputs of ``n`` requests in a batcher of so many slots; runs in a process of its own."""
    model = loaded(backend, threads, max(SLOTS))
    assert model.tokenizer is not None
    batcher = ContinuousBatcher(model.model, slots)
    outputs: dict[int, Output] = {}
    for request in workload(n):
        prompt, length = model.tokenizer.encode(request.prompt), min(longest, request.n_output)
        outputs[batcher.submit(prompt, max_tokens=length, ignore_eos=True, logprobs=2)] = []
    while not batcher.idle:
        step = batcher.step()
        for handle, token in zip(step.handles.tolist(), step.tokens.tolist(), strict=True):
            (_, first), (_, second) = step.logprobs[handle].top
            outputs[handle].append((token, first - second))
    return list(outputs.values())


def tokens_of(output: Output) -> list[int]:
    """The tokens alone."""
    return [token for token, _ in output]


def gap_at(alone: Output, other: Output) -> float | None:
    """How far ahead the best token was where two outputs part; None where they do not."""
    return next((gap for (a, gap), (b, _) in zip(alone, other, strict=True) if a != b), None)
