"""Ragged prefixes as rectangles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models.padded import PaddedModel, padded

PREFIXES = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), min_size=1, max_size=8)


def test_rows_end_in_the_last_column() -> None:
    batch = padded([[7, 8, 9], [5]], buckets=[2, 4])
    assert batch.tokens.tolist() == [[0, 7, 8, 9], [0, 0, 0, 5]]
    assert batch.attention_mask.tolist() == [[False, True, True, True], [False, False, False, True]]
    assert batch.positions.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert batch.padded_share == 0.5


@given(PREFIXES)
def test_every_prefix_can_be_read_back(prefixes: list[list[int]]) -> None:
    batch = padded(prefixes)
    rows = zip(batch.tokens, batch.attention_mask, strict=True)
    assert [tokens[mask].tolist() for tokens, mask in rows] == prefixes
    for positions, mask, prefix in zip(batch.positions, batch.attention_mask, prefixes, strict=True):
        assert positions[mask].tolist() == list(range(len(prefix)))


@given(PREFIXES)
def test_the_width_is_the_smallest_bucket_that_holds_the_longest(prefixes: list[list[int]]) -> None:
    longest = max(map(len, prefixes))
    assert padded(prefixes, [64, 8, 32]).tokens.shape[1] == (8 if longest <= 8 else 32 if longest <= 32 else 64)


def test_a_prefix_longer_than_every_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens is longer than the largest bucket, 4"):
        padded([[1] * 5], [4, 2])


def test_a_model_of_rectangles_runs_in_the_batcher() -> None:
    def next_tokens(tokens: np.ndarray, mask: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return (tokens * mask).sum(-1) + positions[:, -1]

    model = PaddedModel(next_tokens, buckets=[4, 8])
    batcher = ContinuousBatcher(model, 2)
    batcher.submit([1, 2, 3], max_tokens=2)
    batcher.submit([10], max_tokens=1)
    assert sorted(f.output for f in batcher.run()) == [[8, 17], [10]]
    assert (model.n_cells, model.n_padded) == (12, 4)
