"""Rectangles for models that want them: ragged prefixes as padded arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DEFAULT_BUCKETS = (*(quarter << octave for octave in range(2, 11) for quarter in (4, 5, 6, 7)), 8192)
"""Lengths from 16 to 8192, four to each doubling: no row is more than a fifth padding (but for the shortest)."""

CALL_CELLS = 512
"""What one more call of the model may save in cells before it is not worth it."""

PaddedNext = Callable[[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]], Sequence[int] | NDArray[Any]]
"""A model of rectangles: tokens, attention mask and positions, each [B, L], in; one next token id per row out."""


class Padded(NamedTuple):
    """Prefixes aligned to the right, so that the last token of every row is in the last column."""

    tokens: NDArray[np.int32]  # [B, L] 0 where padded
    attention_mask: NDArray[np.bool_]  # [B, L] False where padded
    positions: NDArray[np.int32]  # [B, L] place in the prefix; 0 where padded

    @property
    def padded_share(self) -> float:
        """Share of the cells that are padding, computed for nothing."""
        return 1.0 - float(self.attention_mask.mean())


def padded(prefixes: Sequence[Sequence[int]], buckets: Sequence[int] = DEFAULT_BUCKETS) -> Padded:
    """Lay non-empty prefixes out as [B, L], L the smallest bucket that holds the longest.

    Raises ``ValueError`` where no bucket does.
    """
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    longest = int(lengths.max())
    width = min((bucket for bucket in buckets if bucket >= longest), default=None)
    if width is None:
        raise ValueError(f"a prefix of {longest} tokens is longer than the largest bucket, {max(buckets)}")
    positions = np.arange(width, dtype=np.int32) - (width - lengths)[:, None]
    mask = positions >= 0
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(prefixes)
    return Padded(tokens, mask, np.maximum(positions, 0))


def rectangles(
    lengths: NDArray[np.integer], buckets: Sequence[int] = DEFAULT_BUCKETS, call_cells: int = CALL_CELLS
) -> list[NDArray[np.intp]]:
    """Divide rows among rectangles so that cells, plus ``call_cells`` for each rectangle, are fewest.

    Returns the row numbers of each, rows of one bucket together. Raises ``ValueError`` where no bucket holds a row.
    """
    sizes = np.sort(buckets)
    bucket = np.searchsorted(sizes, lengths)
    if (longest := int(lengths.max())) > sizes[-1]:
        raise ValueError(f"a prefix of {longest} tokens is longer than the largest bucket, {sizes[-1]}")
    used, counts = np.unique(bucket, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])  # rows narrower than the i-th width in use
    fewest, first = [0], []  # for all rows up to the i-th width: cells, and the narrowest width of the last rectangle
    for i, width in enumerate(sizes[used]):
        cells = fewest + (before[i + 1] - before[: i + 1]) * width + call_cells
        first.append(int(cells.argmin()))
        fewest.append(int(cells.min()))
    rows = []
    end = len(used)
    while end:
        narrowest = used[first[end - 1]]
        rows.append(np.flatnonzero((bucket >= narrowest) & (bucket <= used[end - 1])))
        end = first[end - 1]
    return rows


class PaddedModel:
    """A ``model_next`` over a model of rectangles, for the batcher; counts the cells it spends on padding.

    A step takes a few rectangles rather than one as wide as its longest row, which would be mostly padding.
    """

    def __init__(
        self, model: PaddedNext, buckets: Sequence[int] = DEFAULT_BUCKETS, *, call_cells: int = CALL_CELLS
    ) -> None:
        self._model, self._buckets, self._call_cells = model, buckets, call_cells
        self.n_cells = self.n_padded = self.n_calls = 0

    def __call__(self, prefixes: Sequence[Sequence[int]]) -> NDArray[Any]:
        """One next token id per prefix."""
        lengths = np.fromiter(map(len, prefixes), np.int64, len(prefixes))
        groups = rectangles(lengths, self._buckets, self._call_cells)
        answers = [self._answers([prefixes[row] for row in group]) for group in groups]
        in_turn: NDArray[Any] = np.concatenate(answers)[np.argsort(np.concatenate(groups))]
        return in_turn

    def _answers(self, prefixes: Sequence[Sequence[int]]) -> NDArray[Any]:
        batch = padded(prefixes, self._buckets)
        self.n_calls += 1
        self.n_cells += batch.attention_mask.size
        self.n_padded += batch.attention_mask.size - int(batch.attention_mask.sum())
        answers = np.asarray(self._model(*batch))
        if answers.shape != (len(prefixes),):  # in one step's answers, a row too few would shift those of others
            raise ValueError(f"the model answered with shape {answers.shape} for {len(prefixes)} rows")
        return answers
