"""Threads that share phases: every item once, whoever is late."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numba
import numpy as np
import pytest

from tokenmill.worker.models.fast.cpu import instruction_set
from tokenmill.worker.models.fast.kernel import kernel
from tokenmill.worker.models.fast.team import Team, current_step, phase

if instruction_set() is None:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)

PHASES, ITEMS = 5, 40


@phase
@kernel
def add(first, last, before, after):
    for item in range(first, last):
        after[item] += before.sum() + 1  # right only if the phase before is over


@numba.njit(nogil=True)
def work(team, thread, counts):
    step = current_step(team)
    for number in range(PHASES):
        add(team, step, number, ITEMS, 1000, counts[number], counts[number + 1])


def after_steps(n: int) -> np.ndarray:
    """What the counts of all phases are after ``n`` steps, by one thread."""
    counts = np.zeros((PHASES + 1, ITEMS), np.int64)
    for _ in range(n):
        for number in range(PHASES):
            counts[number + 1] += counts[number].sum() + 1
    return counts


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_phases_follow_one_another_and_every_item_is_done_once(n_threads: int) -> None:
    counts = np.zeros((PHASES + 1, ITEMS), np.int64)
    team = Team(n_threads, PHASES, lambda address, thread: work(address, thread, counts))
    for _ in range(3):
        team.run()
    np.testing.assert_array_equal(counts, after_steps(3))


def test_a_helper_that_comes_late_or_never_holds_nobody_up() -> None:
    counts = np.zeros((PHASES + 1, ITEMS), np.int64)
    gate = threading.Event()

    def late(address: int, thread: int) -> None:
        if thread:
            gate.wait()
        work(address, thread, counts)

    team = Team(2, PHASES, late)
    for _ in range(3):
        team.run()
    np.testing.assert_array_equal(counts, after_steps(3))
    gate.set()  # now it meets the counters of steps that are long over
    team.run()
    np.testing.assert_array_equal(counts, after_steps(4))


def test_helpers_end_with_their_team() -> None:
    def helpers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and t.name.startswith("kernels-")]

    before = threading.enumerate()
    team = Team(3, PHASES, lambda address, thread: None)
    assert len(helpers()) == 2
    gone = weakref.ref(team)
    del team
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while helpers():
        assert time.monotonic() < deadline
        time.sleep(0.001)
