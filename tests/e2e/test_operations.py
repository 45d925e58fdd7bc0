"""Cancels, limits, dead letters and a broker that restarts, through the commands that people use."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.producer.client import Client
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.embedded import EmbeddedBroker

from ..waiting import eventually

TOKENMILL = (sys.executable, "-m", "tokenmill.shared.cli")
TIMEOUT_S = 60.0


class Queue:
    """One queue on a broker, and the commands on it."""

    def __init__(self, url: str, name: str) -> None:
        self.broker = Broker(connect(url), name)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        short_leases = {"TOKENMILL_LEASE_MS": "600"}
        self.environment = {**clean, **short_leases, "TOKENMILL_REDIS": url, "TOKENMILL_QUEUE": name}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        command = [*TOKENMILL, *arguments]
        return subprocess.run(
            command, input=stdin, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start one command."""
        command = [*TOKENMILL, *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def queue(url: str, request: pytest.FixtureRequest) -> Queue:
    """A queue of the test's own, without workers."""
    return Queue(url, request.node.name.replace("[", ".").replace("]", "")[:100])


@pytest.fixture
def served(queue: Queue) -> Iterator[Queue]:
    """The same with a slow worker."""
    worker = queue.start("-q", "worker", "--model", "toy:delay_ms=5", "--slots", "2")
    eventually(lambda: queue.broker.info().workers)
    yield queue
    worker.kill()
    worker.communicate()


def endless(request_id: str) -> list[str]:
    return ["enqueue", "Hello", "--id", request_id, "--max-tokens", "1500", "--ignore-eos"]


def test_waiting_and_running_requests_are_cancelled_with_what_they_have(served: Queue) -> None:
    client = Client(served.broker)
    for request_id in ("a", "b", "c"):
        served.run(*endless(request_id), "--no-wait")
    eventually(lambda: served.broker.info().running == 2)
    cancelled = served.run("cancel", "a", "b", "c", "unknown")
    assert cancelled.returncode == 0
    assert cancelled.stdout.splitlines() == [
        "a: cancelled: its worker ends it",
        "b: cancelled: its worker ends it",
        "c: cancelled",
        "unknown: unknown: cancelled should it come",
    ]
    assert [client.wait(request_id, 20).finish_reason for request_id in ("a", "b", "c")] == ["cancelled"] * 3
    assert served.run("cancel", "a").returncode == 0


def test_ctrl_c_cancels_the_request_of_enqueue(served: Queue) -> None:
    command = served.start(*endless("a"), "--stream")
    assert command.stdout is not None
    assert select.select([command.stdout], [], [], TIMEOUT_S)[0], "no output in time"
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130
    assert "request `a` is cancelled" in said
    assert Client(served.broker).wait("a", 20).finish_reason == "cancelled"


def test_ctrl_c_cancels_what_run_has_outstanding(served: Queue, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(f'{{"prompt": "x", "max_tokens": 1500, "ignore_eos": true, "id": "{n}"}}\n' for n in "abcd")
    )
    command = served.start("run", str(source), "-o", str(tmp_path / "out.jsonl"))
    eventually(lambda: served.broker.info().running == 2)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130
    assert "0 of 4 requests are answered, 4 are cancelled" in said
    client = Client(served.broker)
    assert [client.wait(request_id, 20).finish_reason for request_id in "abcd"] == ["cancelled"] * 4


def test_a_stream_closed_early_frees_its_slot(served: Queue) -> None:
    client = Client(served.broker)
    with client.stream("Hello", max_tokens=1500, ignore_eos=True, cancel_on_close=True) as stream:
        next(iter(stream))
    assert client.wait(stream.request_id, 20).finish_reason == "cancelled"


def test_a_deadline_ends_a_request_that_nobody_else_would(served: Queue) -> None:
    done = served.run(*endless("a"), "--timeout-ms", "300", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["finish_reason"] == "deadline"


def test_a_full_queue_refuses_at_once_or_is_waited_for(queue: Queue) -> None:
    assert "max depth: 1 " in queue.run("queue", "limits", "--max-depth", "1").stdout
    assert queue.run("enqueue", "Hello", "--no-wait").returncode == 0
    refused = queue.run("enqueue", "Hello", "--no-wait")
    assert refused.returncode == 1
    assert "tokenmill: error: the queue is full (1 requests" in refused.stderr
    assert "try again in 1 s" in refused.stderr
    waiting = queue.start("enqueue", "Hello", "--id", "late", "--timeout", "30")
    queue.run("queue", "limits", "--max-depth", "0")
    eventually(lambda: queue.broker.state("late"))
    assert queue.run("queue", "empty").stdout == "waiting requests cancelled: 2\n"
    waiting.communicate(timeout=TIMEOUT_S)
    assert waiting.returncode == 0


def test_a_suspended_queue_says_so_and_goes_on_when_told(served: Queue) -> None:
    served.run("queue", "suspend")
    assert "suspended: no worker begins anything" in served.run("info").stdout
    held = served.run("enqueue", "Hello", "--max-tokens", "2", "--id", "a", "--timeout", "0.5")
    assert held.returncode == 1
    assert "is suspended; to go on: tokenmill queue resume" in held.stderr
    served.run("queue", "resume")
    assert Client(served.broker).wait("a", 20).usage.output_tokens == 2


def test_the_same_key_gives_the_same_reply(served: Queue) -> None:
    options = ["--idempotency-key", "order-7", "--max-tokens", "3", "--json"]
    first, second = (json.loads(served.run("enqueue", "Hello", *options).stdout) for _ in range(2))
    assert first == second


def test_a_dead_letter_is_listed_shown_and_dropped(served: Queue) -> None:
    redis = connect(served.environment["TOKENMILL_REDIS"])
    redis.rpush(served.broker.keys.requests, b"\xff no request")
    eventually(lambda: served.broker.info().dead)
    listed = served.run("dead", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    letter_id = json.loads(listed.stdout)["id"]
    assert served.run("dead", "show", letter_id).stdout.endswith("\\xff no request\n")
    assert "dead letters: 1, see" in served.run("info").stdout
    assert served.run("dead", "requeue", letter_id).returncode == 0
    eventually(lambda: [letter.entry_id for letter in served.broker.dead_letters()] not in ([], [letter_id]))
    assert served.run("dead", "drop", "--all").stdout == "dead letters dropped: 1\n"
    assert served.run("dead", "list").stdout == "no dead letters\n"


def test_a_reply_that_somebody_took_is_told_instead_of_waited_for(served: Queue) -> None:
    assert served.run("enqueue", "Hello", "--id", "a", "--max-tokens", "2").returncode == 0
    redis = connect(served.environment["TOKENMILL_REDIS"])
    redis.lpop(served.broker.keys.reply("a"))
    again = served.run("enqueue", "Hello", "--id", "a", "--max-tokens", "2")
    assert again.returncode == 2
    assert "was answered before and its reply is gone" in again.stderr
