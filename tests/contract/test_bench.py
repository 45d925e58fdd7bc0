"""Every measurement runs, in small, on the toy model, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[2]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--model", "toy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


QUICK = ("whole-system", "first-token", "padding", "gateway")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_it_prints_its_tables_and_judges_its_targets(name: str, tmp_path: Path) -> None:
    done = bench(name, "--peers", tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert ("MISSED" in done.stdout) == (done.returncode == 1)
    assert "|--" in done.stdout
    if name == "whole-system":
        for peer in ("service-streamer", "batch-inference"):
            assert f"{peer} is not installed: run make peers" in done.stdout


def test_an_unknown_measurement_is_a_usage_error() -> None:
    done = bench("speed")
    assert done.returncode == 2
    assert "unknown measurement speed" in done.stderr
