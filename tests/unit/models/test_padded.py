"""Ragged prefixes as rectangles."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models.padded import DEFAULT_BUCKETS, PaddedModel, padded, rectangles

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


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True).map(lambda sizes: [*sizes, 200]),
    st.integers(0, 300),
)
def test_rows_are_divided_among_rectangles_at_the_least_cost(
    lengths: list[int], buckets: list[int], call_cells: int
) -> None:
    def cost(groups: Iterable[Iterable[int]]) -> int:
        widths = [min(b for b in buckets if b >= max(lengths[row] for row in group)) for group in groups]
        return sum(len([*group]) * width + call_cells for group, width in zip(groups, widths, strict=True))

    groups = [group.tolist() for group in rectangles(np.array(lengths), buckets, call_cells)]
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    in_order = sorted(range(len(lengths)), key=lengths.__getitem__)
    cuts = (cut for n in range(len(lengths)) for cut in combinations(range(1, len(lengths)), n))
    options = ([in_order[i:j] for i, j in pairwise((0, *cut, len(lengths)))] for cut in islice(cuts, 3000))
    assert cost(groups) <= min(map(cost, options))


def test_no_row_of_the_default_widths_is_more_than_a_fifth_padding() -> None:
    lengths = np.arange(17, 8193)
    widths = np.array(DEFAULT_BUCKETS)[np.searchsorted(DEFAULT_BUCKETS, lengths)]
    assert (lengths / widths).min() >= 0.8


def test_a_row_longer_than_every_bucket_is_refused_before_the_model_is_called() -> None:
    model = PaddedModel(lambda *_: pytest.fail("called"), buckets=[2, 4])
    with pytest.raises(ValueError, match="5 tokens is longer than the largest bucket, 4"):
        model([[1], [1] * 5])


def test_a_model_that_answers_too_few_rows_is_found_out() -> None:
    model = PaddedModel(lambda tokens, *_: tokens[1:, 0], buckets=[2, 4], call_cells=0)
    with pytest.raises(ValueError, match=r"shape \(0,\) for 1 rows"):
        model([[1], [1, 1, 1]])


@given(PREFIXES, st.integers(0, 100))
def test_answers_come_in_the_order_of_the_prefixes(prefixes: list[list[int]], call_cells: int) -> None:
    model = PaddedModel(lambda tokens, mask, positions: tokens[:, -1], [1, 8, 16, 24, 40], call_cells=call_cells)
    assert model(prefixes).tolist() == [prefix[-1] for prefix in prefixes]


def test_a_model_of_rectangles_runs_in_the_batcher() -> None:
    def next_tokens(tokens: np.ndarray, mask: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return (tokens * mask).sum(-1) + positions[:, -1]

    model = PaddedModel(next_tokens, buckets=[4, 8])
    batcher = ContinuousBatcher(model, 2)
    batcher.submit([1, 2, 3], max_tokens=2)
    batcher.submit([10], max_tokens=1)
    assert sorted(f.output for f in batcher.run()) == [[8, 17], [10]]
    assert (model.n_cells, model.n_padded, model.n_calls) == (12, 4, 2)
