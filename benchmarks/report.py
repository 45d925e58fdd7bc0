"""Results as a Markdown page: the targets first, then every measurement with its tables and plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from benchmarks.result import Result, Table

COMMAND = "make bench"
_FIGURE = re.compile(r"-?[\d,.]+(e-?\d+)?( \([\d,.]+ to [\d,.]+\))?( ?[%×]| ms)?")


def page(results: Sequence[Result], machine: Sequence[tuple[str, str]], missing: Sequence[str] = ()) -> str:
    """The whole report; plots are looked for in ``plots/`` beside it. ``missing`` are names without a result."""
    judged = [target for result in results for target in result.targets]
    missed = sum(target.met is False for target in judged)
    unknown = sum(target.met is None for target in judged)
    summary = (
        f"{len(judged) - missed - unknown} of {len(judged)} targets are met, {missed} missed, {unknown} not measured."
    )
    rows = [
        [target.claim, target.measured, target.wanted, target.verdict, f"[{result.name}](#{anchor(result.title)})"]
        for result in results
        for target in result.targets
    ]
    head = [
        "# Benchmarks",
        f"Written by `{COMMAND}`, not by hand. Figures are medians over rounds in which everything that is compared "
        "ran one after the other; in brackets stand the lowest and the highest round. A ratio is that of two medians. "
        f"{summary}",
        table(["machine", ""], [list(row) for row in machine]),
        "## Targets",
        table(["what", "measured", "target", "", "section"], rows),
    ]
    tail = [f"Not measured for lack of time: {', '.join(missing)}."] if missing else []
    return "\n\n".join([*head, *map(section, results), *tail]) + "\n"


def section(result: Result) -> str:
    """One measurement."""
    parts = [f"## {result.title}", result.about]
    parts += [f"{shown.caption}\n\n{table(shown.titles, shown.rows)}" for shown in result.tables]
    parts += [f"![{plot.title}](plots/{plot.name}.svg)" for plot in result.plots]
    parts += [f"- {note}" for note in result.notes]
    parts.append(f"`{COMMAND} BENCH_ARGS={result.name}`" + (f": {result.measured}." if result.measured else ""))
    return "\n\n".join(parts)


def text(result: Result) -> str:
    """One measurement for the terminal: its tables, its targets and what is missing."""
    parts = [result.title, *(_plain(shown) for shown in result.tables)]
    targets = [f"{t.verdict:6} {t.claim}: {t.measured} (target {t.wanted})" for t in result.targets]
    return "\n\n".join([*parts, "\n".join([*targets, *result.notes])])


def anchor(title: str) -> str:
    """Where a heading of the page is linked to."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is to the left, figures are to the right."""
    right = [i > 0 and _is_figures(row[i] for row in rows) for i in range(len(titles))]
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, right, strict=True)
        return "| " + " | ".join(cell.rjust(n) if figure else cell.ljust(n) for cell, n, figure in cells) + " |"

    rule = ["-" * (n + 1) + (":" if figure else "-") for n, figure in zip(widths, right, strict=True)]
    return "\n".join([line(titles), "|" + "|".join(rule) + "|", *map(line, rows)])


def _is_figures(cells: Iterable[str]) -> bool:
    return all(cell in ("", "nan", "–") or _FIGURE.fullmatch(cell) for cell in cells)


def _plain(shown: Table) -> str:
    return f"{shown.caption}\n{table(shown.titles, shown.rows)}"
