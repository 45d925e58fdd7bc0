"""Repeated measurements of one figure, and ratios between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure with the lowest and the highest that the rounds gave."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return significant(self.value)
        return f"{significant(self.value)} ({significant(self.low)} to {significant(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    """The median, and the extremes."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Ratio of the medians; its extremes are those of the rounds, in which both were measured one after the other."""
    rounds = [a / b for a, b in zip(over, under, strict=False)]
    value = statistics.median(over) / statistics.median(under)
    return Spread(value, min(*rounds, value), max(*rounds, value))


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least ``q`` percent do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * q / 100) - 1)]


def significant(value: float) -> str:
    """Three digits, and all those before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
