"""What a measurement found: tables, targets and plots; kept as JSON, so that a report can be written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, field

from benchmarks.samples import Spread, significant

Sense = Literal["at least", "at most"]


class Table(Struct):
    """Rows of text under titles, with a line that says what they are."""

    caption: str
    titles: list[str]
    rows: list[list[str]] = field(default_factory=list)


class Target(Struct):
    """What was promised, and what was measured; ``met`` is None where it could not be."""

    claim: str
    wanted: str
    measured: str = "not measured"
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """PASS, MISSED or a dash."""
        return {True: "PASS", False: "MISSED", None: "–"}[self.met]


class Line(Struct):
    """One line of a plot."""

    label: str
    x: list[float]
    y: list[float]
    marks: list[str] = field(default_factory=list)  # what stands at its points


class Plot(Struct):
    """A line plot; it becomes ``NAME.svg``."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log: bool = False  # both axes


class Result(Struct):
    """One measurement."""

    name: str
    title: str
    about: str  # what was measured and how, for the reader of the report
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing, one line each
    measured: str = ""  # when, beside what load
    broken: bool = False  # it ended with an error, which `about` says

    def judge(self, claim: str, figure: Spread | float, sense: Sense, limit: float, unit: str = "") -> None:
        """Hold a figure against a target."""
        value = figure.value if isinstance(figure, Spread) else figure
        met = value >= limit if sense == "at least" else value <= limit
        sign = "≥" if sense == "at least" else "≤"
        shown = str(figure) if isinstance(figure, Spread) else significant(figure)
        self.targets.append(Target(claim, f"{sign} {limit:g}{unit}", shown + unit, met))

    def require(self, claim: str, wanted: str, measured: str, met: bool) -> None:
        """Hold something that is not a number against what it should be."""
        self.targets.append(Target(claim, wanted, measured, met))

    def cannot_judge(self, claim: str, sense: Sense, limit: float, unit: str = "") -> None:
        """A target whose figures are missing; a note should say why."""
        self.targets.append(Target(claim, f"{'≥' if sense == 'at least' else '≤'} {limit:g}{unit}"))


def failed(results: Sequence[Result]) -> list[Target]:
    """The targets that were missed."""
    return [target for result in results for target in result.targets if target.met is False]
