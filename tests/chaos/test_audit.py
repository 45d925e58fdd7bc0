"""The audit notices each thing that can go wrong: an evidence without fault passes, and one fault each is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from tokenmill.shared.protocol import Reply, Usage

from .audit import audit
from .config import Config
from .evidence import Evidence
from .ledger import Seen
from .toxic import Toxic
from .workload import GoodRequest


def reply(request_id: str, text: str, reason: Any = "length") -> Reply:
    return Reply(id=request_id, finish_reason=reason, text=text, usage=Usage(prompt_tokens=1, output_tokens=len(text)))


def encoded(*replies: Reply) -> list[bytes]:
    return [msgspec.json.encode(reply) for reply in replies]


PLAIN = GoodRequest("plain", {"prompt": "x"}, "push", reply("plain", "abc"))
STREAM = GoodRequest("stream", {"prompt": "x", "stream": True}, "submit", reply("stream", "abc"))
TOXIC = Toxic("toxic", b"{", "dead letter and error")
GOOD = Evidence(
    config=Config(),
    accepted={request.id: request for request in (PLAIN, STREAM)},
    cancelled={"plain": None},
    toxic=[TOXIC],
    perhaps_toxic=[],
    seen=[Seen(STREAM, "abc", reply("stream", "abc"))],
    replies={
        "plain": encoded(reply("plain", "abc")),
        "stream": encoded(reply("stream", "abc")),
        "toxic": encoded(reply("toxic", "", "error")),
    },
    posted={"plain": 1, "stream": 1},
    stats={"finished_length": 2, "finished_error": 1},
    dead_letters=1,
    lasting=["dead", "meta", "stats"],
    unbalanced=[],
    problems=[],
    struck={},
    network={},
    exits={},
    generated=6,
    took_s=1.0,
)


def replies(**changed: list[bytes]) -> dict[str, list[bytes]]:
    return {request_id: bodies for request_id, bodies in {**GOOD.replies, **changed}.items() if bodies}


def test_a_run_without_fault_passes() -> None:
    assert audit(GOOD).findings == {}


def test_a_cancelled_request_may_have_the_beginning_of_its_text() -> None:
    assert audit(dataclasses.replace(GOOD, replies=replies(plain=encoded(reply("plain", "ab", "cancelled"))))).ok


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        ("lost", {"replies": replies(plain=[])}),
        ("duplicated", {"replies": replies(plain=encoded(reply("plain", "abc"), reply("plain", "abc")))}),
        ("duplicated", {"posted": {"plain": 2}}),
        ("duplicated", {"stats": {"finished_length": 3, "finished_error": 1}}),
        ("invented", {"replies": replies(other=encoded(reply("other", "abc")))}),
        ("wrong", {"replies": replies(plain=encoded(reply("plain", "abd")))}),
        ("wrong", {"replies": replies(plain=encoded(reply("plain", "abd", "cancelled")))}),
        ("wrong", {"replies": replies(plain=encoded(reply("plain", "ab", "deadline")))}),
        ("wrong", {"replies": replies(stream=encoded(reply("stream", "ab", "cancelled")))}),
        ("cancelled", {"cancelled": {"plain": "cancelled"}}),
        ("streams", {"seen": [Seen(STREAM, "abbc", reply("stream", "abc"))]}),
        ("streams", {"seen": [Seen(STREAM, "ac", reply("stream", "abc"))]}),
        ("streams", {"seen": [Seen(STREAM, "abc", reply("stream", "abc", "stop"))]}),
        ("streams", {"seen": []}),
        ("toxic", {"replies": replies(toxic=[])}),
        ("toxic", {"dead_letters": 2}),
        ("left", {"lasting": ["leases", "meta"]}),
        ("left", {"unbalanced": ["husks"]}),
        ("left", {"stats": {**GOOD.stats, "script_errors": 1}}),
        ("problems", {"problems": ["a worker ended by itself"]}),
    ],
)
def test_a_fault_is_found(check: str, fault: dict[str, Any]) -> None:
    assert audit(dataclasses.replace(GOOD, **fault)).count(check)


def test_one_innocent_request_in_five_thousand_may_be_blamed_and_no_more() -> None:
    blamed = {name: encoded(reply(name, "", "error")) for name in ("plain", "stream")}
    one = dataclasses.replace(GOOD, replies={**GOOD.replies, "plain": blamed["plain"]}, dead_letters=2)
    assert audit(one).ok
    assert audit(dataclasses.replace(GOOD, replies={**GOOD.replies, **blamed})).count("blamed") == 2
