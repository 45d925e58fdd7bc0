"""The workload is the same every time, and as it is described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.workload import MAX_OUTPUT, MEAN_OUTPUT, arrivals, output_lengths, questions, total_output, workload
from tokenmill.shared.errors import UsageError


def test_the_same_seed_gives_the_same_requests() -> None:
    assert workload(20) == workload(20)
    assert workload(20) != workload(20, seed=8)


def test_a_smaller_workload_is_the_beginning_of_a_larger_one() -> None:
    assert workload(5) == workload(50)[:5]


def test_prompts_differ_and_have_about_35_words() -> None:
    prompts = [request.prompt for request in workload(256)]
    assert len(set(prompts)) == 256
    assert all(27 <= len(prompt.split()) <= 43 for prompt in prompts)


def test_outputs_are_exponential_with_a_cap() -> None:
    lengths = output_lengths(5_000)
    assert min(lengths) >= 1
    assert max(lengths) == MAX_OUTPUT
    assert sum(lengths) / 5_000 == pytest.approx(MEAN_OUTPUT, rel=0.05)
    assert total_output(workload(5_000)) == sum(lengths)


def test_arrivals_begin_at_once_and_come_at_the_rate() -> None:
    moments = arrivals(2_000, 10.0)
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(200.0, rel=0.1)


def test_questions_are_the_turns_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"turns": ["Why?", "Are you sure?"]}) + "\n" + json.dumps({"turns": ["How?"]}) + "\n")
    assert questions(file) == ["Why?", "Are you sure?", "How?"]


def test_a_missing_file_of_questions_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no questions at"):
        questions(tmp_path / "nowhere.jsonl")
