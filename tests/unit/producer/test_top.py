"""What `tokenmill top` draws in terminals of any size, and how it takes an outage."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokenmill.producer.top import View, watch
from tokenmill.shared.broker import QueueInfo, WorkerInfo

from .fakes import EMPTY_QUEUE, FakeBroker, make_worker

CELLS = [[2000, 120], None, [12_300, 0], [600_000, 12_345]]


def worker(name: str = "w1", cells: list[Any] | None = None, **status: Any) -> WorkerInfo:
    cells = CELLS if cells is None else cells
    busy = sum(cell is not None for cell in cells)
    return make_worker(name, busy=busy, cells=cells, output_tokens_per_s=91.4, **{"slots": len(cells), **status})


def drawn(info: QueueInfo, *, width: int = 80, height: int | None = None, view: View | None = None) -> list[str]:
    view = view or View("mine", "here")
    view.update(info)
    console = Console(file=io.StringIO(), width=width)
    console.print(view.lines(0.0, width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_it_shows_depth_age_rate_and_a_cell_for_each_slot() -> None:
    lines = drawn(EMPTY_QUEUE._replace(waiting=5, oldest_age_ms=1500, running=3, workers=[worker()]))
    assert lines == [
        "queue mine at here",
        "5 waiting (the oldest for 1.5 s) · 3 running · 3 of 4 slots busy · 91 tok/s",
        "w1  running  3/4  91 tok/s",
        "2.1s  120│    ·    │ 12s    0│ 10m  12k",
        "errors: none",
    ]


def test_cells_wrap_in_a_narrow_terminal() -> None:
    lines = drawn(EMPTY_QUEUE._replace(workers=[worker()]), width=25)
    assert lines[3:5] == ["2.1s  120│    ·", "12s    0│ 10m  12k".rjust(19)]


def test_slots_shrink_where_the_cells_are_too_many_lines() -> None:
    workers = [worker("w2"), worker("w1")]
    lines = drawn(EMPTY_QUEUE._replace(workers=workers), height=6)
    assert lines[2:4] == ["w1  running  3/4  91 tok/s  █·░█", "w2  running  3/4  91 tok/s  █·░█"]


def test_workers_without_a_line_are_counted() -> None:
    workers = [worker(f"w{n}") for n in range(7)]
    lines = drawn(EMPTY_QUEUE._replace(workers=workers), height=7)
    assert lines[-2:] == ["… and 4 more workers: make the terminal higher", "errors: none"]


@given(
    st.lists(st.lists(st.none() | st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), max_size=40), max_size=20),
    st.integers(1, 200),
    st.integers(7, 60),
)
def test_no_line_is_too_long_and_there_are_never_too_many(slots: list[list[Any]], width: int, height: int) -> None:
    workers = [worker(f"w{n}", cells) for n, cells in enumerate(slots)]
    info = EMPTY_QUEUE._replace(workers=workers, suspended=True, dead=3, stats={"finished_error": 3, "fenced": 1})
    lines = drawn(info, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_errors_are_told_with_those_since_the_view_was_opened() -> None:
    view = View("mine", "here")
    drawn(EMPTY_QUEUE._replace(stats={"finished_error": 2, "enqueued": 10}), view=view)
    lines = drawn(EMPTY_QUEUE._replace(stats={"finished_error": 3, "reclaimed": 1}), view=view)
    assert lines[-1] == "errors: 3 failed (+1), 1 taken from silent workers (+1)"


def test_what_is_out_of_the_ordinary_is_told() -> None:
    lines = drawn(EMPTY_QUEUE._replace(suspended=True, dead=2, max_depth=9))
    text = "\n".join(lines)
    for part in ("tokenmill queue resume", "dead letters: 2", "limit: 9", "no worker is alive"):
        assert part in text
    silent = worker()._replace(age_ms=8200)
    assert "w1  running  3/4  91 tok/s  silent for 8 s" in drawn(EMPTY_QUEUE._replace(workers=[silent]))


def test_a_worker_of_an_older_version_is_shown_without_cells() -> None:
    assert "w1  running  0/8  0 tok/s" in drawn(EMPTY_QUEUE._replace(workers=[make_worker()]))


def test_a_broker_that_goes_away_is_waited_for_with_the_last_look_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, view = FakeBroker(), View("mine", "here")
    broker.workers = [worker()]
    frames: list[str] = []

    def sleep(seconds: float) -> None:
        frames.append("\n".join(shown(view, broker.now)))
        broker.now += seconds
        if len(frames) == 2:
            broker.away_until = broker.now + 2.5
        if len(frames) == 7:
            raise KeyboardInterrupt

    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    watch(broker.as_broker(), view, console, interval_s=1.0, clock=broker.clock, sleep=sleep)
    away = [frame.split("\n")[1] for frame in frames if "away" in frame]
    assert away == [f"the broker has been away for {n} s; trying again until it is back" for n in (0, 1, 2)]
    assert all("w1  running" in frame for frame in frames)
    assert "away" not in frames[-1]


def shown(view: View, now: float) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(view.lines(now, width=80, height=24))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()
