"""Values noted by one thread and added up by another."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.meter import Distribution, Meter


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.01, 50), min_size=1, unique=True).map(sorted))
def test_counts_are_cumulative_by_upper_bound(values: list[float], bounds: list[float]) -> None:
    subject = Distribution(bounds)
    subject.note(values)
    counts, total = subject.read()
    expected = [sum(value <= bound for value in values) for bound in bounds]
    assert [count for _, count in counts] == [*expected, len(values)]
    assert [bound for bound, _ in counts] == [*(f"{bound:g}" for bound in bounds), "+Inf"]
    assert total == pytest.approx(sum(values))


def test_no_value_is_lost_or_counted_twice_while_another_thread_reads() -> None:
    subject = Distribution([1, 2])
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            subject.read()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3000):
        subject.note((0.5, 1.5, 2.5))
    done.set()
    reader.join()
    assert subject.read() == ([("1", 3000), ("2", 6000), ("+Inf", 9000)], 13500)


def test_what_is_noted_takes_bounded_memory_although_nobody_reads() -> None:
    subject = Distribution([1])
    for _ in range(100):
        subject.note(np.zeros(1000).tolist())
    assert len(subject._noted) <= 10_000


def test_a_step_keeps_as_many_slots_busy_as_it_has_rows() -> None:
    meter = Meter()
    meter.note_step(0.5, rows=3, tokens=40)
    meter.note_step(0.25, rows=2, tokens=2)
    assert meter.busy_seconds == 2.0
    assert meter.step_tokens.read()[1] == 42
