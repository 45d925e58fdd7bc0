"""The operators' verbs: what they tell the broker, and what they print."""

from __future__ import annotations

import json

import pytest

from tokenmill.producer import dead, workplace
from tokenmill.shared import cli
from tokenmill.shared.broker import DeadLetter

from .fakes import FakeBroker


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    fake = FakeBroker()
    fake.letters = [
        DeadLetter("1000-0", "the request is not valid JSON", "", b"\xff\x1b[31mred", 10),
        DeadLetter("2000-0", "it crashed alone twice", "poison", b'{"id":"poison"}', 15),
        DeadLetter("3000-0", "the request is larger than the limit", "huge", b"x" * 10, 5000),
    ]
    monkeypatch.setattr(workplace, "open_broker", lambda _redis, _queue: fake)
    return fake


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_cancel_tells_what_became_of_each_and_is_content_with_all(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.states = {"a": "waiting", "b": "running", "c": "stop"}
    code, out, err = run("cancel", "a", "b", "c", "d", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "a: cancelled",
        "b: cancelled: its worker ends it",
        "c: finished before (stop)",
        "d: unknown: cancelled should it come",
    ]


def test_cancel_of_nothing_is_code_2(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cancel", capsys=capsys)[0] == 2


def test_suspend_and_resume(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("queue", "suspend", "--queue", "q", capsys=capsys) == (0, "queue q is suspended\n", "")
    assert broker.settings.suspended
    assert run("queue", "resume", "--queue", "q", capsys=capsys) == (0, "queue q goes on\n", "")
    assert not broker.settings.suspended


def test_empty_says_how_many(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("queue", "empty", capsys=capsys)[1] == "waiting requests cancelled: 3\n"


def test_limits_are_shown_and_changed_one_by_one(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max depth: none (0 requests are waiting)" in run("queue", "limits", capsys=capsys)[1]
    run("queue", "limits", "--max-depth", "100", capsys=capsys)
    out = run("queue", "limits", "--max-queued-tokens", "5000", capsys=capsys)[1]
    assert out == "max depth: 100 (0 requests are waiting)\nmax queued tokens: 5000 (0 are queued)\n"
    assert "max depth: none" in run("queue", "limits", "--max-depth", "0", capsys=capsys)[1]
    assert broker.settings.max_queued_tokens == 5000


def test_dead_letters_are_listed_without_steering_the_terminal(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.letters[1] = broker.letters[1]._replace(why="\x1b[31m[bold]it crashed")
    code, out, _ = run("dead", "list", capsys=capsys)
    assert code == 0
    for part in ("1000-0", "2000-0", "3000-0", "1970-01-01 00:00:02", "poison", r"\x1b[31m[bold]it"):
        assert part in out
    assert "\x1b" not in out


def test_dead_letters_as_json_are_one_a_line(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("dead", "list", "--json", capsys=capsys)[1].splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["1000-0", "2000-0", "3000-0"]
    assert json.loads(lines[1]) == {
        "id": "2000-0",
        "died": "1970-01-01T00:00:02.000+00:00",
        "request": "poison",
        "why": "it crashed alone twice",
        "size": 15,
    }


def test_no_dead_letters_is_said(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.letters = []
    assert run("dead", "list", capsys=capsys)[1] == "no dead letters\n"


def test_a_dead_letter_is_shown_with_what_was_pushed(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("dead", "show", "1000-0", capsys=capsys)
    assert code == 0
    assert out.splitlines()[-1] == r"\xff\x1b[31mred"
    assert "5000 bytes, of which the last 4990 were not kept" in run("dead", "show", "3000-0", capsys=capsys)[1]
    letter = json.loads(run("dead", "show", "2000-0", "--json", capsys=capsys)[1])
    assert letter["payload"] == '{"id":"poison"}'


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["show", "4000-0"], 1, "dead letter 4000-0: there is no such dead letter"),
        (["show", "poison"], 2, "`poison` is no dead letter: take the id from `tokenmill dead list`"),
        (["drop"], 2, "give the ids of dead letters, or --all"),
        (["requeue", "1000-0", "--all"], 2, "give the ids of dead letters, or --all"),
    ],
)
def test_wrong_ids_are_one_clear_line(
    arguments: list[str], code: int, what: str, broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dead", *arguments, capsys=capsys) == (code, "", f"tokenmill: error: {what}\n")
    assert len(broker.letters) == 3


def test_requeue_sends_what_it_can_and_names_the_rest(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.requeue_answers = {"3000-0": "cut"}
    code, out, err = run("dead", "requeue", "--all", capsys=capsys)
    assert (code, out) == (1, "dead letters sent again: 2\n")
    assert err == "tokenmill: error: dead letter 3000-0: it was too large to be kept whole\n"
    assert [letter.entry_id for letter in broker.letters] == ["3000-0"]


def test_drop_takes_some_or_all(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dead", "drop", "1000-0", "9-9", capsys=capsys) == (0, "dead letters dropped: 1\n", "")
    assert run("dead", "drop", "--all", capsys=capsys) == (0, "dead letters dropped: 2\n", "")
    assert broker.letters == []


def test_what_is_printable_stays() -> None:
    assert dead.printable("naïve — 日本\n") == "naïve — 日本\n"
    assert dead.printable("a\x1b[2J\x07\u202eb\t") == r"a\x1b[2J\x07\u202eb\t"
