"""The broker benchmark runs without the other queues, and says that they are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = "benchmarks.broker"


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_it_prints_costs_rates_and_memory_and_judges_the_rate(tmp_path: Path) -> None:
    sizes = ("--rounds", 1, "--requests", 1_000, "--memory-requests", 100)
    done = bench(*sizes, "--peers", tmp_path)
    assert done.returncode in (0, 1), done.stderr
    for row in ("1 token, bare push", "64 tokens, each streamed", "to enqueue: enqueue script", "finished, reply kept"):
        assert f"| {row} " in done.stdout
    assert ("MISSED" in done.stdout) == (done.returncode == 1)
    for peer in ("RQ SimpleWorker", "arq", "SAQ", "taskiq", "Celery"):
        assert f"{peer} is not installed" in done.stdout


def test_a_missing_redis_server_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", MODULE, "--server", "redis"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env={"PATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "redis-server is not on PATH" in done.stderr
