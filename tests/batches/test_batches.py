"""Batches from the file to the files: states, kills, cancels, expiry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ..e2e.workplace import wait_for
from .conftest import Bureau, line


def test_a_batch_answers_its_lines_and_keeps_the_errors_apart(bureau: Bureau) -> None:
    bureau.workplace.start("toy")
    bureau.start()
    lines = [line(0), line(1, echo=True), line(2, n=2), line(3, max_tokens=0)]
    batch = bureau.ended(bureau.submit(lines))
    assert (batch.status, batch.counts.total, batch.counts.completed, batch.counts.failed) == ("completed", 4, 2, 2)
    answers = {answer["custom_id"]: answer for answer in bureau.lines(batch, "output")}
    assert set(answers) == {"line-0", "line-2"}
    assert answers["line-0"]["response"]["status_code"] == 200
    assert answers["line-0"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert len(answers["line-2"]["response"]["body"]["choices"]) == 2
    errors = {error["custom_id"]: error["response"]["body"]["error"] for error in bureau.lines(batch, "error")}
    assert {name: error["param"] for name, error in errors.items()} == {"line-1": "echo", "line-3": "max_tokens"}
    assert {"in_progress_at", "finalizing_at", "completed_at"} <= set(batch.moments)


def test_an_input_that_is_none_fails_before_anything_is_begun(bureau: Bureau) -> None:
    bureau.start()
    batch = bureau.ended(bureau.submit([line(0), line(0)]))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors] == [("duplicate_custom_id", 2)]
    assert bureau.workplace.broker.info().stats == {}


def test_a_batch_of_which_every_line_failed_says_so_with_the_commonest_error(bureau: Bureau) -> None:
    bureau.workplace.start("toy")
    bureau.start()
    batch = bureau.ended(bureau.submit([line(0, echo=True), line(1, echo=True), line(2, best_of=2)]))
    assert (batch.status, batch.counts.failed) == ("failed", 3)
    assert "`echo` is not supported" in batch.errors[0].message
    assert len(bureau.lines(batch, "error")) == 3


def test_cancelling_keeps_what_is_answered(bureau: Bureau) -> None:
    bureau.workplace.start("toy:delay_ms=5")
    bureau.start()
    batch_id = bureau.submit([line(i, max_tokens=10) for i in range(1200)])
    wait_for(lambda: bureau.find(batch_id).counts.completed > 20)
    bureau.run("batch", "cancel", batch_id)
    batch = bureau.ended(batch_id)
    assert batch.status == "cancelled"
    done, left = bureau.lines(batch, "output"), bureau.lines(batch, "error")
    assert 20 < len(done) < 1200
    assert len(done) + len(left) == 1200
    assert {error["error"]["code"] for error in left} == {"batch_cancelled"}
    wait_for(lambda: bureau.workplace.broker.info().running == 0)


def test_a_batch_that_does_not_end_in_time_expires_with_what_it_has(bureau: Bureau) -> None:
    bureau.start()  # and no worker
    batch_id = bureau.submit([line(i) for i in range(5)])
    batch = bureau.find(batch_id)
    batch.expires_at = batch.created_at + 1
    bureau.office.records.begin(batch)
    ended = bureau.ended(batch_id)
    assert ended.status == "expired"
    assert {error["error"]["code"] for error in bureau.lines(ended, "error")} == {"batch_expired"}


@pytest.mark.parametrize("victim", ["batch worker", "its job", "generation worker"])
def test_a_kill_in_the_middle_repeats_no_line_and_loses_none(bureau: Bureau, victim: str) -> None:
    workers = [bureau.workplace.start("toy:delay_ms=2", "--slots", "16") for _ in range(2)]
    batch_workers = [bureau.start() for _ in range(2)]
    batch_id = bureau.submit([line(i) for i in range(2000)])
    wait_for(lambda: bureau.find(batch_id).counts.completed > 300, 60)
    if victim == "batch worker":
        batch_workers[0].kill()
    elif victim == "generation worker":
        workers[0].kill()
    else:
        os.kill(child_of(batch_workers[0]), signal.SIGKILL)
    batch = bureau.ended(batch_id)
    assert (batch.status, batch.counts.completed, batch.counts.failed) == ("completed", 2000, 0)
    answers = Counter(answer["custom_id"] for answer in bureau.lines(batch, "output"))
    assert answers == Counter(f"line-{i}" for i in range(2000))
    stats = bureau.workplace.broker.info().stats
    assert stats["finished_length"] == 2000  # each generated to its end once


def child_of(process: subprocess.Popen[str]) -> int:
    """The process that a batch worker has forked for a job."""
    found: list[int] = []

    def look() -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found[:] = map(int, children)
        return bool(found)

    wait_for(look)
    return found[0]


def test_the_commands(bureau: Bureau, tmp_path: Path) -> None:
    bureau.workplace.start("toy")
    bureau.start()
    source, output, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    source.write_text("".join(json.dumps(part) + "\n" for part in (line(0), line(1, echo=True))))
    batch_id = bureau.run("batch", "submit", str(source)).strip()
    assert "completed: 1 completed, 1 failed, of 2 lines" in bureau.run("batch", "status", batch_id, "--wait")
    assert batch_id in bureau.run("batch", "list")
    bureau.run("batch", "download", batch_id, "-o", str(output), "--errors", str(errors))
    assert [json.loads(raw)["custom_id"] for raw in output.read_text().splitlines()] == ["line-0"]
    assert [json.loads(raw)["custom_id"] for raw in errors.read_text().splitlines()] == ["line-1"]
    assert json.loads(bureau.run("batch", "status", batch_id, "--json"))["status"] == "completed"
