"""The page of the wire protocol is true: its tables and JSON Schema are the structs, its streams a real worker's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from docs import generate
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.keys import Keys
from tokenmill.shared.protocol import FinishReason, Request, StrictRequest
from tokenmill.shared.settings import DEFAULTS

from ..e2e.workplace import DEADLINE_S, Workplace

PAGE = generate.PAGE.read_text()
SCHEMA = generate.schema()


def validator(message: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/$defs/{message}", "$defs": SCHEMA["$defs"]})


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_the_schema_file_is_what_make_docs_writes() -> None:
    assert generate.SCHEMA.read_text() == generate.schema_text(), "run `make docs`"


def test_the_tables_are_what_make_docs_writes() -> None:
    assert generate.page_text(PAGE) == PAGE, "run `make docs`"


def test_every_message_and_field_has_its_table_and_row() -> None:
    rows = first_cells(PAGE)
    for part in SCHEMA["$defs"].values():
        assert set(part["properties"]) <= set(rows)
    assert {f"fields: {name}" for name in SCHEMA["$defs"]} <= set(re.findall(r"<!-- (fields: \w+) -->", PAGE))


def test_all_finish_reasons_and_error_codes_are_told() -> None:
    codes = SCHEMA["$defs"]["ReplyError"]["properties"]["code"]["enum"]
    assert {*get_args(FinishReason), *codes} <= set(first_cells(section("Reply")))


def test_the_keys_told_are_those_of_the_package() -> None:
    keys = Keys("QUEUE")
    for key in (keys.requests, keys.high, keys.low, keys.reply("ID"), keys.tokens("ID"), keys.replies("NAME")):
        assert f"`{key}`" in section("Keys")
    assert f"`{keys.request('ID')}`" in section("Keys")


def test_the_numbers_told_are_the_defaults() -> None:
    for number in (DEFAULTS.max_payload_bytes, DEFAULTS.max_context):
        assert f" {number:,} " in section("Limits")
    assert f"({DEFAULTS.reply_ttl_ms:,} ms" in section("Reading the reply")
    assert f"within {DEFAULTS.block_s:g} s" in section("What a bare push gets")


ACCEPTED: list[dict[str, Any]] = [
    {"id": "a", "prompt": "x"},
    {"id": "a", "prompt": [1, 2]},
    {"id": "a", "messages": [{"role": "user", "content": "x"}], "stop": "###", "logprobs": 20, "seed": -(2**63)},
    {"id": "a", "prompt": "x", "stop": ["a", "b"], "logit_bias": {"5": -100}, "timeout_ms": None, "of the future": 1},
]
REFUSED: list[dict[str, Any]] = [
    {"id": "a"},
    {"prompt": "x"},
    {"id": "a", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
    {"id": "a b", "prompt": "x"},
    {"id": "a", "prompt": [-1]},
    {"id": "a", "messages": [{"role": "user", "content": "x", "name": "y"}]},
    {"id": "a", "prompt": "x", "max_tokens": 0},
    {"id": "a", "prompt": "x", "top_p": 0},
    {"id": "a", "prompt": "x", "stop": [""]},
    {"id": "a", "prompt": "x", "logprobs": 21},
    {"id": "a", "prompt": "x", "priority": "urgent"},
    {"id": "a", "prompt": "x", "timeout_ms": 0},
    {"id": "a", "prompt": "x", "reply_to": "a/b"},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=json.dumps)
def test_the_schema_accepts_what_a_worker_accepts(fields: dict[str, Any]) -> None:
    msgspec.convert(fields, Request)
    validator("Request").validate(fields)


@pytest.mark.parametrize("fields", REFUSED, ids=json.dumps)
def test_the_schema_refuses_what_a_worker_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Request)
    assert not validator("Request").is_valid(fields)


def test_the_schema_knows_the_defaults() -> None:
    known = {name: field.get("default") for name, field in SCHEMA["$defs"]["Request"]["properties"].items()}
    for field in msgspec.structs.fields(StrictRequest):
        if field.default is not msgspec.NODEFAULT and field.default is not msgspec.UNSET:
            assert known[field.name] == field.default


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, toy_broker: str) -> Iterator[Workplace]:
    workplace = Workplace(toy_broker, tmp_path_factory.mktemp("protocol"))
    workplace.start("toy")
    yield workplace
    workplace.close()


def push(served: Workplace, **fields: Any) -> dict[str, Any]:
    """A request by a bare push; its reply, checked against the schema."""
    client, keys = redis.Redis.from_url(served.url, socket_timeout=None), Keys(served.queue)
    client.rpush(keys.requests, json.dumps(fields))
    body = client.blmove(keys.reply(fields["id"]), keys.reply(fields["id"]), DEADLINE_S, "LEFT", "LEFT")
    reply: dict[str, Any] = json.loads(body)
    validator("Reply").validate(reply)
    return reply


def test_replies_are_what_the_schema_says(served: Workplace) -> None:
    assert push(served, id="text", prompt="Hello", max_tokens=5)["finish_reason"] in ("length", "stop")
    assert len(push(served, id="ids", prompt=[72, 101], max_tokens=5)["token_ids"]) == 5
    assert push(served, id="wrong", prompt="Hello", top_p=7)["error"]["code"] == "invalid_request"
    assert push(served, id="long", prompt="x" * 3000)["error"]["code"] == "context_length"
    assert push(served, id="nothing")["error"]["code"] == "invalid_request"


def test_replies_of_the_broker_itself_are_too(served: Workplace) -> None:
    unserved = Broker(connect(served.url), "unserved")
    unserved.enqueue("waiting", b'{"id":"waiting","prompt":"Hello"}')
    assert unserved.cancel("waiting") == "cancelled"
    body = unserved.wait_reply("waiting", DEADLINE_S)
    assert body is not None
    reply = json.loads(body)
    validator("Reply").validate(reply)
    assert (reply["finish_reason"], reply["deliveries"], "worker" in reply) == ("cancelled", 0, False)


def test_the_streams_have_the_fields_told(served: Workplace) -> None:
    reply = push(served, id="streamed", prompt="Hello", max_tokens=5, stream=True, reply_to="me")
    client, keys = redis.Redis.from_url(served.url, decode_responses=True), Keys(served.queue)
    entries = [fields for _, fields in client.xrange(keys.tokens("streamed"))]
    assert {name for fields in entries for name in fields} == set(first_cells(section("Reading tokens")))
    assert "".join(fields.get("text", "") for fields in entries) == reply["text"]
    assert entries[-1] == {"end": reply["finish_reason"]}
    assert [fields for _, fields in client.xrange(keys.replies("me"))] == [{"id": "streamed"}]
    assert client.hget(keys.request("streamed"), "state") == reply["finish_reason"]


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", PAGE))
def test_the_files_linked_exist(path: str) -> None:
    assert (Path(generate.FOLDER) / path).exists()


fractions = st.floats(-1000, 1000).filter(lambda number: number % 1)  # 1.0 is an integer to JSON Schema alone
plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | fractions | st.text() | st.sampled_from(["a", "low"])
values = plain | st.lists(plain, max_size=3) | st.dictionaries(st.sampled_from(["5", "x"]), plain)
OPTIONAL = [name for name in SCHEMA["$defs"]["Request"]["properties"] if name not in ("id", "prompt", "messages")]


def refusal(fields: dict[str, Any]) -> str | None:
    """What a worker says against a request."""
    try:
        msgspec.convert(fields, Request)
    except msgspec.ValidationError as error:
        return str(error)
    return None


@settings(max_examples=500)
@given(st.sampled_from(OPTIONAL), values)
def test_schema_and_workers_agree_on_any_value_of_any_field(name: str, value: Any) -> None:
    why = refusal(fields := {"id": "a", "prompt": "x", name: value})
    if why is None or not why.startswith("`"):  # that would be a rule about two fields, which the schema leaves out
        assert validator("Request").is_valid(fields) == (why is None), why
