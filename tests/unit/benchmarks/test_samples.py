"""Medians, ratios and how they are written."""

from __future__ import annotations

import pytest

from benchmarks.samples import Spread, percentile, ratio, significant, spread


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_a_ratio_is_that_of_the_medians_and_spreads_over_the_rounds() -> None:
    assert ratio([10.0, 20.0, 30.0], [10.0, 5.0, 5.0]) == Spread(4.0, 1.0, 6.0)


def test_a_ratio_lies_within_its_spread_even_where_no_round_gave_it() -> None:
    found = ratio([1.0, 10.0, 10.0], [1.0, 1.0, 10.0])  # medians 10 and 1, rounds 1, 10 and 1
    assert found.low <= found.value <= found.high


def test_a_ratio_of_one_round_has_no_spread() -> None:
    assert str(ratio([6.0], [2.0])) == "3.00"


@pytest.mark.parametrize(("q", "expected"), [(0, 1.0), (50, 2.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_one_of_the_values(q: float, expected: float) -> None:
    assert percentile([4.0, 2.0, 1.0, 3.0], q) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.5, "1.50"), (12.34, "12.3"), (1234.5, "1,234"), (float("nan"), "nan")],
)
def test_figures_have_three_digits_and_all_before_the_point(value: float, text: str) -> None:
    assert significant(value) == text
