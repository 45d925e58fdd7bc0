"""Files of requests: a broken line is named by file and line, whatever is wrong with it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tokenmill.producer.jsonl import RequestFile, Size
from tokenmill.shared.errors import UsageError

GOOD = '{"prompt": "Hello"}'


def write(folder: Path, *lines: str | bytes) -> RequestFile:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return RequestFile(str(path), prefix="run")


def problem(folder: Path, *lines: str | bytes) -> str:
    """What is said about a file, without the folder."""
    with write(folder, *lines) as file, pytest.raises(UsageError) as caught:
        file.check()
    return str(caught.value).replace(f"{folder}/", "")


def test_lines_become_requests_in_order_with_ids_from_their_line_numbers(tmp_path: Path) -> None:
    chat = '{"messages": [{"role": "user", "content": "Hi"}], "id": "mine"}'
    with write(tmp_path, GOOD, "", chat, GOOD, "  ") as file:
        assert file.check() == Size(requests=3, max_tokens=3 * 128)
        assert [request.id for request in file.requests()] == ["run-1", "mine", "run-4"]
        assert [request.id for request in file.requests()] == ["run-1", "mine", "run-4"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "Hi"', "not JSON: "),
        ("nonsense", "not JSON: "),
        (b'{"prompt": "\xff"}', "not JSON: "),
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "a JSON object is expected"),
        ('"Hi"', "a JSON object is expected"),
        ("{}", "give either `prompt` or `messages`"),
        ('{"prompt": "Hi", "messages": []}', "give either `prompt` or `messages`"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": []}', "the prompt is empty"),
        ('{"messages": []}', "the prompt is empty"),
        ('{"prompt": "Hi", "max_token": 3}', "unknown field `max_token`"),
        ('{"prompt": "Hi", "max_tokens": -1}', "max_tokens: expected `int` >= 1"),
        ('{"prompt": "Hi", "max_tokens": 0}', "max_tokens: expected `int` >= 1"),
        ('{"prompt": "Hi", "max_tokens": "9"}', "max_tokens: expected `int`, got `str`"),
        ('{"prompt": "Hi", "temperature": -0.1}', "temperature: expected `float` >= 0"),
        ('{"prompt": "Hi", "top_p": 0}', "top_p: expected `float` > 0"),
        ('{"prompt": "Hi", "stop": [""]}', "stop[0]: expected `str` of length >= 1"),
        ('{"prompt": [-1]}', "prompt[0]: expected `int` >= 0"),
        ('{"prompt": 7}', "prompt: expected"),
        ('{"prompt": "Hi", "id": "with space"}', "id: expected `str` matching regex"),
        ('{"prompt": "Hi", "min_tokens": 9, "max_tokens": 3}', "`min_tokens` is larger than `max_tokens`"),
        ('{"messages": [{"role": "wizard", "content": "Hi"}]}', "messages[0].role: invalid enum value 'wizard'"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: object missing required field `content`"),
        (json.dumps({"prompt": "x" * 300_000}), "the request has 300,0"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(line: str | bytes, what: str, tmp_path: Path) -> None:
    told = problem(tmp_path, GOOD, "", line, GOOD)
    assert told.startswith(f"in.jsonl:3: {what}")
    assert told.endswith("(nothing was enqueued)")
    assert "\n" not in told


def test_an_id_may_occur_once(tmp_path: Path) -> None:
    line = '{"prompt": "Hi", "id": "a"}'
    assert problem(tmp_path, line, GOOD, line).startswith("in.jsonl:3: id: `a` is already the id of line 1")


def test_many_problems_are_listed_up_to_ten(tmp_path: Path) -> None:
    told = problem(tmp_path, *["nonsense"] * 13).splitlines()
    assert told[0] == "13 lines of in.jsonl are broken; nothing was enqueued"
    assert [line.split(": ")[0].strip() for line in told[1:-1]] == [f"in.jsonl:{n}" for n in range(1, 11)]
    assert told[-1].strip() == "and 3 more"


def test_an_empty_file_and_a_missing_one_are_told(tmp_path: Path) -> None:
    assert problem(tmp_path, "").startswith("in.jsonl holds no request: ")
    with pytest.raises(UsageError, match=r"cannot read .*gone\.jsonl: No such file"):
        RequestFile(str(tmp_path / "gone.jsonl"), prefix="run")


def test_stdin_is_read_as_often_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{GOOD}\n{GOOD}\n".encode())))
    with RequestFile("-", prefix="run") as file:
        assert file.check().requests == 2
        assert [request.id for request in file.requests()] == ["run-1", "run-2"]


def test_problems_of_stdin_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"oops\n")))
    with RequestFile("-", prefix="run") as file, pytest.raises(UsageError, match=r"^stdin:1: not JSON"):
        file.check()
