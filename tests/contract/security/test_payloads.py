"""Data stays data: limits of size and depth, no unpickling and no running of what was sent, one clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill.shared.broker import Broker
from tokenmill.shared.protocol import Reply
from tokenmill.worker.intake import RejectedError, take_in
from tokenmill.worker.models import LoadedModel, load_model

ROOT = Path(__file__).parents[3]
LIMIT = 1000


@pytest.fixture(scope="module")
def toy() -> LoadedModel:
    return load_model("toy", slots=1)


@pytest.mark.parametrize("depth", [1001, 5000, 200_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_what_is_nested_too_deeply_is_refused_by_a_line(toy: LoadedModel, depth: int, opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    payload = b'{"id":"a","prompt":"x","unknown":' + opening * depth + b"1" + closing * depth + b"}"
    with pytest.raises(RejectedError, match=r"^the request is nested too deeply$"):
        take_in(payload, toy.model, toy.tokenizer)


HEADS = [b"[" * 50_000, b'{"id":' * 5000, b'{"id":"\xff"}', b'{"id":7}', b"null", b"", b"~", b'{"id":"' + b"x" * 2**20]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
def test_a_queue_with_anything_at_its_head_can_be_looked_at(head: bytes, admin: Any) -> None:
    broker = Broker(admin, "looked-at")
    admin.rpush(broker.keys.high, head)
    assert broker.info().waiting == 1
    admin.delete(broker.keys.high)


def _exchange(broker: Broker) -> list[str]:
    answer = broker.exchange("w", slots=8, ack=0, lease_ms=1000, reply_ttl_ms=1000)
    return [claim.id for claim in answer.claims]


def _sized(name: str, size: int) -> bytes:
    frame = b'{"id":"%s","prompt":""}' % name.encode()
    return frame.replace(b'""', b'"%s"' % (b"x" * (size - len(frame))))


def test_a_push_is_taken_up_to_the_limit_and_not_beyond(admin: Any) -> None:
    broker = Broker(admin, "sizes", max_payload_bytes=LIMIT)
    admin.rpush(broker.keys.requests, _sized("fits", LIMIT), _sized("over", LIMIT + 1))
    assert _exchange(broker) == ["fits"]
    reply = msgspec.json.decode(broker.wait_reply("over", 0) or b"", type=Reply)
    assert reply.error is not None
    assert reply.error.message == "the request is larger than the limit"


def test_ten_megabytes_leave_a_short_dead_letter_and_their_true_size(admin: Any) -> None:
    broker = Broker(admin, "huge")
    admin.rpush(broker.keys.requests, _sized("huge", 10 * 2**20), _sized("next", LIMIT))
    assert _exchange(broker) == ["next"]
    [letter] = broker.dead_letters()
    assert (letter.id, len(letter.payload), letter.size) == ("huge", 65536, 10 * 2**20)
    assert broker.requeue_dead(letter.entry_id) == "cut"


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for folder in ("shared", "producer", "worker"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path, node


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def test_nothing_unpickles_and_nothing_runs_what_was_sent() -> None:
    unsafe = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml"}
    runs = {"eval", "exec", "compile", "os.system", "os.popen"}
    found = [path.name for path, node in _nodes() if unsafe & set(_imported(node)) or _called(node) in runs]
    assert found == []


def test_templates_are_rendered_in_a_sandbox_alone() -> None:
    used = {name for _, node in _nodes() for name in _imported(node) if name.startswith("jinja2.")}
    assert {name for name in used if name.endswith("Environment")} == {"jinja2.sandbox.ImmutableSandboxedEnvironment"}


def test_no_clock_of_this_machine_counts_that_somebody_may_set() -> None:
    """Deadlines and leases are the broker's time, waits are monotonic: a clock that jumps changes nothing."""
    wall = {
        "time.time",
        "time.time_ns",
        "time.localtime",
        "time.gmtime",
        "datetime.now",
        "datetime.utcnow",
        "date.today",
    }
    wall |= {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today"}
    # What is only shown: when an answer, a job or a file was made.
    stamps = {"chat.py", "commands.py", "files.py", "generation.py", "jobs.py", "line.py"}
    found = {path.name for path, node in _nodes() if _called(node) in wall or "time.time" in _imported(node)}
    assert found <= stamps
