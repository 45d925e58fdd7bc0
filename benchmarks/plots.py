"""Plots as SVG files, the same bytes for the same figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result import Plot
from tokenmill.shared.errors import UsageError

SIZE_INCHES = (7.0, 4.2)


def draw(plot: Plot, folder: Path) -> Path:
    """Write ``NAME.svg`` and return its path; UsageError where matplotlib is missing."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("plots need matplotlib; run: pip install 'tokenmill[bench]'") from None
    mpl.rcParams.update({"svg.hashsalt": plot.name, "font.size": 9, "axes.spines.right": False})
    mpl.rcParams.update({"axes.spines.top": False, "legend.frameon": False})
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for line in plot.lines:
        axes.plot(line.x, line.y, marker="o", markersize=4, label=line.label)
        for x, y, mark in zip(line.x, line.y, line.marks, strict=False):
            axes.annotate(mark, (x, y), xytext=(4, -9), textcoords="offset points", fontsize=7, color="0.4")
    if plot.log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.25)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plot.name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path
