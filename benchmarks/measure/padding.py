"""What a padded model computes for nothing: one rectangle a step, and several by length."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import Result, Table
from benchmarks.samples import significant
from benchmarks.settings import Bench
from tokenmill.shared.errors import UsageError
from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models.padded import DEFAULT_BUCKETS, rectangles

TRACES = Path("../shared/data")
CAPACITY, MAX_OUTPUT = 32, 256
POWERS = tuple(2**i for i in range(4, 14))
ABOUT = (
    "A model of rectangles computes whole prefixes, padded to a common width. The lengths are those of two production "
    f"services (Azure 2023), in their order, in a batcher of {CAPACITY} rows; outputs end after {MAX_OUTPUT} tokens. "
    "Sorted: requests are admitted by the length of their prompt."
)
Lengths = NDArray[np.int64]


def measure(bench: Bench, traces: Path = TRACES) -> Result:
    result = Result("padding", "Padding", ABOUT)
    for name in ("code", "conv"):
        path = traces / f"azure2023_{name}.csv"
        if not path.is_file():
            result.notes.append(f"no trace at {path}; its lengths were not measured")
            continue
        requests = read(path)[: bench.size(512, 40)]
        steps = {order: run(requests, order == "sorted") for order in ("in order", "sorted")}
        titles = ["admission", "layout", "padded %", "calls a step"]
        table = Table(f"{name}, {len(requests)} requests, {len(steps['in order'])} steps in order:", titles)
        for order, lengths in steps.items():
            for layout, divide in LAYOUTS.items():
                share, calls = padded_share(lengths, divide)
                table.rows.append([order, layout, significant(share * 100), significant(calls)])
        result.tables.append(table)
        share, _ = padded_share(steps["in order"], several)
        result.judge(f"padded share of {name} in rectangles by length", share * 100, "at most", 25.0, " %")
    return result


def read(path: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the requests that fit into the widest rectangle. Raises ``UsageError``."""
    try:
        with path.open() as file:
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path} is not a trace with ContextTokens and GeneratedTokens: {error!r}") from error
    clipped = [(prompt, min(max(1, output), MAX_OUTPUT)) for prompt, output in rows]
    return [(prompt, output) for prompt, output in clipped if 0 < prompt <= DEFAULT_BUCKETS[-1] - output]


def run(requests: Sequence[tuple[int, int]], by_length: bool) -> list[Lengths]:
    """Lengths of the prefixes in every step of a continuous batcher."""
    steps: list[Lengths] = []

    def next_tokens(prefixes: list[list[int]]) -> list[int]:
        steps.append(np.array([len(prefix) for prefix in prefixes]))
        return [1] * len(prefixes)

    key = (lambda request: len(request.prompt)) if by_length else None
    batcher = ContinuousBatcher(next_tokens, CAPACITY, admission_key=key)
    for prompt, output in requests:
        batcher.submit([1] * prompt, max_tokens=output)
    batcher.run()
    return steps


Divide = Callable[[Lengths], list[tuple[int, int]]]
"""From the lengths of a step to rectangles, rows × width."""


def longest(lengths: Lengths) -> list[tuple[int, int]]:
    return [(len(lengths), int(lengths.max()))]


def one_power(lengths: Lengths) -> list[tuple[int, int]]:
    return [(len(lengths), _width(lengths, POWERS))]


def several_powers(lengths: Lengths) -> list[tuple[int, int]]:
    return [(len(rows), _width(lengths[rows], POWERS)) for rows in rectangles(lengths, POWERS)]


def several(lengths: Lengths) -> list[tuple[int, int]]:
    return [(len(rows), _width(lengths[rows], DEFAULT_BUCKETS)) for rows in rectangles(lengths)]


LAYOUTS: dict[str, Divide] = {
    "one rectangle, as wide as the longest": longest,
    "one, a power of two wide": one_power,
    "several, powers of two": several_powers,
    "several, four widths to a doubling": several,
}


def padded_share(steps: list[Lengths], divide: Divide) -> tuple[float, float]:
    """Share of all cells that is padding, and calls of the model for a step."""
    layouts = [divide(lengths) for lengths in steps]
    cells = sum(rows * width for layout in layouts for rows, width in layout)
    tokens = sum(int(lengths.sum()) for lengths in steps)
    return 1 - tokens / cells, sum(map(len, layouts)) / len(layouts)


def _width(lengths: Lengths, buckets: Sequence[int]) -> int:
    return buckets[int(np.searchsorted(buckets, lengths.max()))]
