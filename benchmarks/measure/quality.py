"""How far a backend's predictions are from those of the same weights in float32."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import process
from benchmarks.result import Result, Table
from benchmarks.samples import significant
from benchmarks.settings import TOY, Backend, Bench
from benchmarks.workload import questions
from tokenmill.shared.errors import UsageError
from tokenmill.worker.engine import Batch

TEXTS, LONGEST = 32, 96
CLAIM = "KL divergence of the fast backend from float32, MT-bench text"
ABOUT = (
    "Both compute the same tokens, one after the other, and at each of them the distributions of the next are "
    "compared: the Kullback-Leibler divergence of the backend from float32 (the NumPy backend, which computes with the "
    "file's weights exactly), the perplexity of the text under both, and how often the likeliest token is the same."
)


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all tokens."""

    n_tokens: int
    divergence: float  # nats
    perplexity: float
    reference_perplexity: float
    same_best: float  # share of the tokens


def measure(bench: Bench) -> Result:
    result = Result("quality", "Quality against float32", ABOUT)
    reference = Backend("numpy", bench.best.model) if bench.best.name != TOY else bench.best
    others = [backend for backend in bench.backends if backend.name != "numpy"]
    try:
        texts = questions(bench.questions)[: bench.size(TEXTS, 2)]
    except UsageError as error:
        texts, others = [], []
        result.notes.append(str(error))
    rows = []
    for backend in others:
        with process() as run:
            found = run(compare, backend, reference, bench.threads, texts, bench.size(LONGEST, 8))
        n, *figures, same = astuple(found)
        rows.append([backend.name, f"{n:,}", *map(significant, figures), f"{100 * same:.1f} %"])
        if backend.name == "fast":
            result.judge(CLAIM, found.divergence, "at most", 0.005)
    if "fast" not in [backend.name for backend in others]:
        result.cannot_judge(CLAIM, "at most", 0.005)
    titles = ["backend", "tokens", "KL", "perplexity", "of float32", "same best token"]
    result.tables.append(Table("Means over all tokens of the text:", titles, rows))
    return result


def compare(backend: Backend, reference: Backend, threads: int, texts: list[str], longest: int) -> Quality:
    """Feed the texts to both models, a token of each text a step; runs in a process of its own."""
    mine, exact = (each.load(slots=len(texts), threads=threads) for each in (backend, reference))
    assert exact.tokenizer is not None
    rows = [exact.tokenizer.encode(text)[:longest] for text in texts]
    sums, n = np.zeros(4), 0
    for position in range(longest - 1):
        contexts = [i for i, row in enumerate(rows) if len(row) > position + 1]
        if not contexts:
            break
        batch = _step(contexts, [rows[i][position] for i in contexts], position)
        following = np.array([rows[i][position + 1] for i in contexts])
        # Both answer in arrays of their own, which the next call may overwrite.
        sums += _sums(_log_softmax(mine.model.forward(batch)), _log_softmax(exact.model.forward(batch)), following)
        n += len(contexts)
    divergence, loss, exact_loss, same = sums / n
    return Quality(n, float(divergence), float(np.exp(loss)), float(np.exp(exact_loss)), float(same))


def _step(contexts: list[int], tokens: list[int], position: int) -> Batch:
    n = len(contexts)
    numbers, starts = np.array(contexts, np.int32), np.full(n, position, np.int32)
    return Batch(numbers, starts, np.ones(n, np.int32), np.array(tokens, np.int32), np.ones(n, np.bool_))


def _sums(mine: NDArray[np.float64], exact: NDArray[np.float64], following: NDArray[np.int64]) -> NDArray[np.float64]:
    """Divergence, both losses, and how many best tokens are the same; over the rows."""
    rows = np.arange(len(following))
    divergence = (np.exp(exact) * (exact - mine)).sum()
    same = (mine.argmax(1) == exact.argmax(1)).sum()
    return np.array([divergence, -mine[rows, following].sum(), -exact[rows, following].sum(), same])


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
