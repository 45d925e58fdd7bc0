"""Rectangles for models that want them: ragged prefixes as padded arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DEFAULT_BUCKETS = tuple(2**i for i in range(4, 14))
"""Lengths from 16 to 8192: each is at most half padding, and a compiled model sees only ten shapes."""

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


class PaddedModel:
    """A ``model_next`` over a model of rectangles, for the batcher; counts the cells it spends on padding."""

    def __init__(self, model: PaddedNext, buckets: Sequence[int] = DEFAULT_BUCKETS) -> None:
        self._model, self._buckets = model, buckets
        self.n_cells = self.n_padded = 0

    def __call__(self, prefixes: Sequence[Sequence[int]]) -> Sequence[int] | NDArray[Any]:
        """One next token id per prefix."""
        batch = padded(prefixes, self._buckets)
        self.n_cells += batch.attention_mask.size
        self.n_padded += batch.attention_mask.size - int(batch.attention_mask.sum())
        return self._model(*batch)
