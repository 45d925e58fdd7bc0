"""Results become a page with every target, table and plot in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import plots, report
from benchmarks.result import Line, Plot, Result, Table, failed
from benchmarks.samples import Spread


@pytest.fixture
def result() -> Result:
    found = Result("speed", "Speed, of all kinds", "How fast it is.", measured="today")
    found.tables.append(Table("Tokens per second:", ["", "tok/s"], [["ours", "1,095"], ["theirs", "143"]]))
    found.plots.append(Plot("speed", "Speed", "x", "y", [Line("ours", [1.0, 2.0], [3.0, 4.0])]))
    found.judge("throughput over theirs", Spread(7.66, 7.5, 7.8), "at least", 6.0, "×")
    found.judge("latency", 3.0, "at most", 2.0, " ms")
    found.cannot_judge("throughput over the third", "at least", 10.0, "×")
    found.notes.append("the third is not installed: run make peers")
    return found


def test_targets_stand_first_with_their_verdicts(result: Result) -> None:
    page = report.page([result], [("processor", "fast")])
    assert "1 of 3 targets are met, 1 missed, 1 not measured." in page
    targets = [line for line in page.splitlines() if "[speed](#speed-of-all-kinds)" in line]
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in targets]
    assert cells == [
        ["throughput over theirs", "7.66 (7.50 to 7.80)×", "≥ 6×", "PASS"],
        ["latency", "3.00 ms", "≤ 2 ms", "MISSED"],
        ["throughput over the third", "not measured", "≥ 10×", "–"],
    ]
    assert page.index("| processor |") < page.index("## Targets") < page.index("## Speed, of all kinds")


def test_a_section_has_its_table_its_plot_and_what_is_missing(result: Result) -> None:
    section = report.section(result)
    assert "| ours   | 1,095 |\n| theirs |   143 |" in section
    assert "![Speed](plots/speed.svg)" in section
    assert "- the third is not installed: run make peers" in section
    assert "`make bench BENCH_ARGS=speed`: today." in section


def test_only_missed_targets_fail(result: Result) -> None:
    assert [target.claim for target in failed([result])] == ["latency"]


def test_a_result_survives_being_kept(result: Result) -> None:
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result


def test_a_plot_is_the_same_file_every_time(result: Result, tmp_path: Path) -> None:
    first = plots.draw(result.plots[0], tmp_path / "a").read_bytes()
    assert plots.draw(result.plots[0], tmp_path / "b").read_bytes() == first
    assert b"ours" in first
