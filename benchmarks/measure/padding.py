"""What a model of rectangles computes for nothing, on the lengths of two production services."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.result import Result, Table
from benchmarks.settings import Bench
from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models.padded import PaddedModel

TRACES = {"code": "azure2023_code.csv", "conversation": "azure2023_conv.csv"}
SLOTS, LONGEST, MOST_OUTPUT = 32, 8192, 64
POWERS = tuple(2**i for i in range(4, 14))  # one rectangle a step as wide as its longest row: what was there before
ABOUT = (
    "Batches of whole prefixes, as a padded `model_next` gets them, with prompt and output lengths of two production "
    "services (Azure, 2023): the share of the computed cells that is padding, in one rectangle a step whose width is a "
    "power of two, and in the rectangles that `PaddedModel` lays out, with their calls of the model a step."
)


def measure(bench: Bench) -> Result:
    result = Result("padding", "Padding of models that want rectangles", ABOUT)
    rows = []
    for name, file in TRACES.items():
        path = bench.traces / file
        if not path.is_file():
            result.notes.append(f"no trace at {path}: name the folder of {file} with --traces")
            continue
        before, after, calls = shares(lengths(path, bench.size(256, 8)))
        rows.append([name, f"{100 * before:.1f} %", f"{100 * after:.1f} %", f"{calls:.2f}"])
    titles = ["lengths", "padding before", "now", "calls a step"]
    result.tables.append(Table(f"{SLOTS} slots:", titles, rows))
    return result


def lengths(path: Path, n: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of the first ``n`` requests that fit."""
    with path.open() as file:
        pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return [(prompt, min(output, MOST_OUTPUT)) for prompt, output in pairs if prompt + MOST_OUTPUT <= LONGEST][:n]


def shares(requests: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Padded share in one rectangle a step, in those of ``PaddedModel``, and its calls a step."""
    now = PaddedModel(lambda tokens, mask, positions: np.ones(len(tokens), np.int32))
    steps = cells = filled = 0

    def count(prefixes: list[list[int]]) -> np.ndarray:
        nonlocal steps, cells, filled
        widths = [len(prefix) for prefix in prefixes]
        steps, filled = steps + 1, filled + sum(widths)
        cells += len(widths) * min(width for width in POWERS if width >= max(widths))
        return now(prefixes)

    batcher = ContinuousBatcher(count, SLOTS)
    for prompt, output in requests:
        batcher.submit([1] * max(1, prompt), max_tokens=max(1, output), ignore_eos=True)
    batcher.run()
    return 1 - filled / cells, now.n_padded / now.n_cells, now.n_calls / steps
