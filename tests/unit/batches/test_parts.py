"""Lines, their validation, parts that go on where they ended, and files."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.producer.batches.files import FileStore, FileTooLargeError
from tokenmill.producer.batches.line import LineError, LineResponse, Outcome, Task
from tokenmill.producer.batches.office import window_seconds
from tokenmill.producer.batches.part import Part, outcomes
from tokenmill.producer.batches.validation import CHUNK_LINES, check
from tokenmill.shared.errors import UsageError
from tokenmill.shared.protocol import Reply, Usage

COMPLETIONS = "/v1/completions"


def line(custom_id: str = "a", **fields: Any) -> bytes:
    body = {"model": "m", "prompt": "x"}
    whole = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body, **fields}
    return json.dumps(whole).encode() + b"\n"


def outcome(number: int, *, failed: bool = False) -> Outcome:
    error = LineError(code="x", message="no") if failed else None
    response = None if failed else LineResponse(status_code=200, request_id=str(number), body={})
    return Outcome(id=str(number), custom_id=str(number), response=response, error=error)


def checked(tmp_path: Path, content: bytes, **options: Any) -> Any:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return check(path, **{"endpoint": COMPLETIONS, "max_lines": 10_000, **options})


def test_chunks_cover_all_lines_and_know_where_they_begin(tmp_path: Path) -> None:
    lines = [line(str(i)) for i in range(2 * CHUNK_LINES + 1)]
    found = checked(tmp_path, b"".join(lines))
    assert (found.total, found.errors) == (len(lines), [])
    assert [(chunk.first, chunk.lines) for chunk in found.chunks] == [
        (0, CHUNK_LINES),
        (CHUNK_LINES, CHUNK_LINES),
        (2 * CHUNK_LINES, 1),
    ]
    content = b"".join(lines)
    assert all(content[chunk.offset :].startswith(lines[chunk.first]) for chunk in found.chunks)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (line("a") + b"{", "invalid_line", 2),
        (line("a") + b"\n", "invalid_line", 2),
        (line("a") + line("a"), "duplicate_custom_id", 2),
        (line("a") + line("b", url="/v1/chat/completions"), "mismatched_url", 2),
        (line("a", method="GET"), "invalid_line", 1),
        (line("a", body=3), "invalid_line", 1),
        (b"\xff\xfe\n", "invalid_line", 1),
        (b"", "empty_file", None),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, content: bytes, code: str, number: int | None) -> None:
    found = checked(tmp_path, content)
    assert [(error.code, error.line) for error in found.errors] == [(code, number)]


def test_too_many_lines_and_an_unknown_endpoint_are_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, line("a") + line("b"), max_lines=1).errors[0].code == "too_many_lines"
    assert checked(tmp_path, line("a"), endpoint="/v1/embeddings").errors[0].code == "invalid_endpoint"


def test_a_bad_body_fails_alone() -> None:
    task = Task(line("a", body={"model": "m", "prompt": "x", "echo": True}), "b.0")
    assert task.requests == []
    result = task.outcome([])
    assert result.failed
    assert result.response is not None
    assert (result.custom_id, result.response.status_code) == ("a", 400)
    assert "echo" in result.problem


def test_a_line_runs_at_low_priority_under_ids_that_a_second_run_makes_again() -> None:
    raw = line("a", body={"model": "m", "prompt": "x", "n": 2, "stream": True})
    first, second = Task(raw, "b.7"), Task(raw, "b.7")
    assert first.requests == second.requests
    assert [(r.id, r.priority, r.stream) for r in first.requests] == [("b.7.0", "low", False), ("b.7.1", "low", False)]
    usage = Usage(prompt_tokens=1, output_tokens=1)
    replies = [Reply(id=r.id, finish_reason="stop", text=r.id, usage=usage) for r in first.requests]
    result = first.outcome(replies)
    assert result.response is not None
    assert [choice["text"] for choice in result.response.body["choices"]] == ["b.7.0", "b.7.1"]


@given(cut=st.integers(0, 400), kinds=st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_part_goes_on_after_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, kinds: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("part") / "part.jsonl"
    with Part(path, alive=lambda: None) as part:
        part.append([outcome(i, failed=failed) for i, failed in enumerate(kinds)])
        assert (part.completed, part.failed) == (kinds.count(False), kinds.count(True))
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    with Part(path, alive=lambda: None) as part:
        assert part.lines == content[: max(0, len(content) - cut)].count(b"\n")
        part.append([outcome(i) for i in range(part.lines, len(kinds))])
    assert [result.custom_id for _, result in outcomes(path)] == [str(i) for i in range(len(kinds))]


def _hold(path: Path, held: Any, done: Any) -> None:
    with Part(path, alive=lambda: None):
        held.set()
        done.wait(20)


def test_one_process_at_a_time_holds_a_part(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "part", held, done))
    other.start()
    assert held.wait(20)
    asked = iter((None, done.set(), *([None] * 100)))
    with Part(tmp_path / "part", alive=lambda: next(asked)):
        assert done.is_set()
    other.join()

    def gone() -> None:
        raise UsageError("the worker has gone")

    with Part(tmp_path / "part", alive=gone):
        pass  # nobody else holds it: not asked


def test_files_are_a_callers_own_and_bounded(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=10)
    kept = store.add("alice", "in.jsonl", "batch", [b"12345", b"678"])
    assert (kept.bytes, kept.filename) == (8, "in.jsonl")
    assert b"".join(store.content("alice", kept.id)) == b"12345678"
    assert [file.id for file in store.list("alice")] == [kept.id]
    assert store.find("bob", kept.id) is None
    assert not store.remove("bob", kept.id)
    with pytest.raises(FileTooLargeError):
        store.add("alice", "big", "batch", [b"x" * 11])
    assert [path.name for path in tmp_path.rglob("*.part")] == []
    assert store.find("alice", "../bob/secret") is None
    assert store.remove("alice", kept.id)
    assert store.list("alice") == []


@pytest.mark.parametrize(("window", "seconds"), [("30m", 1800), ("24h", 86_400), ("7d", 604_800)])
def test_windows(window: str, seconds: int) -> None:
    assert window_seconds(window) == seconds


@pytest.mark.parametrize("window", ["", "h", "0h", "8d", "-1h", "24", "1.5h", "9" * 40 + "h"])
def test_windows_that_are_none(window: str) -> None:
    with pytest.raises(UsageError, match="completion window"):
        window_seconds(window)
