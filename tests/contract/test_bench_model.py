"""The model benchmark runs on any model, and says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "model.py"


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--model", "toy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_prints_rates_and_judges_the_ratios(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["Why?", "Are you sure?"]}) + "\n")
    done = bench("--questions", questions, "--requests", 40)
    assert done.returncode in (0, 1), done.stderr
    assert "static, B = 32" in done.stdout
    assert done.stdout.count("PASS") + done.stdout.count("FAIL") == 2
    assert ("FAIL" in done.stdout) == (done.returncode == 1)


def test_missing_questions_are_one_line(tmp_path: Path) -> None:
    done = bench("--questions", tmp_path / "nowhere.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no questions at" in done.stderr
    assert done.stderr.count("\n") == 1
