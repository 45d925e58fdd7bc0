"""The commands as people run them: whole files through private workers that are killed, stopped and missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenmill.shared.broker import QueueInfo
from tokenmill.shared.embedded import EmbeddedBroker

from ..waiting import alive, eventually

TOKENMILL = (sys.executable, "-m", "tokenmill.shared.cli")
SLOW_TOY = "toy:delay_ms=10"
TIMEOUT_S = 60.0

linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def environment(**settings: str) -> dict[str, str]:
    """This environment without the user's own settings; leases are short, so that a killed worker costs little."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    return {**clean, "TOKENMILL_LEASE_MS": "600", **settings}


def tokenmill(*arguments: str, stdin: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [*TOKENMILL, *arguments]
    return subprocess.run(
        command, input=stdin, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )


def jsonl(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def prompts(count: int, max_tokens: int = 20) -> list[dict[str, Any]]:
    return [
        {"id": f"line-{n}", "prompt": f"number {n}", "max_tokens": max_tokens, "ignore_eos": True} for n in range(count)
    ]


def descendants(pid: int) -> list[int]:
    """All processes below one, from /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    below, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        below += frontier
    return below


def workers_below(pid: int) -> list[int]:
    """The worker processes that a command has started."""
    return [child for child in descendants(pid) if {b"worker", b"--parent-pid"} <= set(command_line(child))]


def command_line(pid: int) -> list[bytes]:
    """The words a process was started with; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


class Running:
    """A ``tokenmill run`` on its way, with two workers and enough to do for some seconds."""

    def __init__(self, folder: Path, count: int = 60) -> None:
        self.target = folder / "out.jsonl"
        source = folder / "in.jsonl"
        source.write_text(jsonl(prompts(count, max_tokens=40)))
        options = ["--model", SLOW_TOY, "--slots", "4", "--workers", "2"]
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*TOKENMILL, "run", str(source), "-o", str(self.target), *options], env=environment(), stderr=stderr
            )
        self._stderr = folder / "stderr"

    def wait_for_lines(self, count: int) -> None:
        eventually(lambda: self.process.poll() is not None or len(self.lines()) >= count)
        assert self.process.poll() is None, self.said()

    def lines(self) -> list[bytes]:
        return self.target.read_bytes().splitlines(keepends=True) if self.target.exists() else []

    def said(self) -> str:
        return self._stderr.read_text()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def worker(url: str) -> Iterator[str]:
    """A queue with one toy worker; its name."""
    process = subprocess.Popen(
        [*TOKENMILL, "worker", "--redis", url, "--queue", "served", "--model", "toy"],
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    eventually(lambda: json.loads(tokenmill("info", "--json", "--redis", url, "--queue", "served").stdout)["workers"])
    yield "served"
    process.terminate()
    process.wait()


def test_run_answers_every_line_in_order(tmp_path: Path) -> None:
    lines = [*prompts(30), {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}]
    (tmp_path / "in.jsonl").write_text(jsonl(lines))
    done = tokenmill("run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", "toy")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "31/31 done" in done.stderr
    assert "31 replies" in done.stderr
    replies = read((tmp_path / "out.jsonl").read_text())
    assert [reply["id"] for reply in replies[:30]] == [f"line-{n}" for n in range(30)]
    assert replies[30]["id"].startswith("run-")
    assert replies[30]["id"].endswith("-31")
    assert all(reply["usage"]["output_tokens"] == 20 for reply in replies[:30])


def test_run_reads_stdin_and_writes_stdout_and_nothing_but_data_there() -> None:
    done = tokenmill("-q", "run", "-", "--model", "toy", "--workers", "1", stdin=jsonl(prompts(3)))
    assert done.returncode == 0, done.stderr
    assert [reply["id"] for reply in read(done.stdout)] == ["line-0", "line-1", "line-2"]


def test_a_request_that_fails_is_code_1_and_its_neighbours_are_answered() -> None:
    lines = [*prompts(2), {"prompt": "x" * 5000}, {"prompt": "end", "max_tokens": 2}]
    done = tokenmill("run", "-", "--model", "toy", "--workers", "1", stdin=jsonl(lines))
    assert done.returncode == 1
    assert "tokenmill: error: 1 of 4 requests failed; the reason: context_length: " in done.stderr
    replies = read(done.stdout)
    assert [reply["finish_reason"] == "error" for reply in replies] == [False, False, True, False]
    assert replies[2]["error"]["code"] == "context_length"


def test_a_model_that_cannot_load_is_code_4_in_one_line(tmp_path: Path) -> None:
    done = tokenmill("-q", "run", "-", "-o", str(tmp_path / "out"), "--model", "nonsense", stdin=jsonl(prompts(1)))
    assert done.returncode == 4
    assert done.stderr.startswith("tokenmill: error: ")
    assert done.stderr.count("\n") == 1
    assert "nonsense" in done.stderr
    assert not (tmp_path / "out").exists()


@linux_only
def test_a_worker_killed_in_the_middle_costs_no_answer_and_doubles_none(running: Running) -> None:
    running.wait_for_lines(5)
    victim = workers_below(running.process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    assert running.process.wait(TIMEOUT_S) == 0, running.said()
    replies = [json.loads(line) for line in running.lines()]
    assert [reply["id"] for reply in replies] == [f"line-{n}" for n in range(60)]
    assert all(reply["usage"]["output_tokens"] == 40 for reply in replies)
    assert "killed by SIGKILL, likely out of memory; starting it again" in running.said()


@linux_only
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_nothing_outlives_a_command_that_is_stopped(name: str, code: int, running: Running) -> None:
    running.wait_for_lines(5)
    below = descendants(running.process.pid)
    assert len(below) >= 3  # two workers and the broker
    running.process.send_signal(signal.Signals[name])
    assert running.process.wait(TIMEOUT_S) == code
    eventually(lambda: not any(alive(pid) for pid in below))
    assert "Traceback" not in running.said()
    assert all(line.endswith(b"\n") and json.loads(line) for line in running.lines())


@linux_only
def test_a_private_broker_that_dies_is_told_instead_of_waited_for(running: Running) -> None:
    running.wait_for_lines(5)
    programs = {pid: b"".join(command_line(pid)[:1]).partition(b" ")[0] for pid in descendants(running.process.pid)}
    [broker] = [pid for pid, program in programs.items() if b"valkey-server" in program]
    os.kill(broker, signal.SIGKILL)
    assert running.process.wait(TIMEOUT_S) == 3
    assert "tokenmill: error: the private broker has ended" in running.said()


def test_demo_writes_the_replies_and_sums_them_up(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(jsonl(prompts(8)))
    done = tokenmill("demo", "--prompts", "mine.jsonl", "--model", "toy", "--slots", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read((tmp_path / "out" / "demo.jsonl").read_text())) == 8
    for part in ("output rate", "TTFT p50 / p95", "queue time p50 / p95", "slot occupancy", "8 length", "number 0"):
        assert part in done.stdout
    assert "2 of 2 workers are ready" in done.stderr


def test_enqueue_and_run_use_the_workers_that_are_there(worker: str, url: str) -> None:
    there = ("--redis", url, "--queue", worker)
    whole = tokenmill("enqueue", "Hello", "--max-tokens", "6", "--ignore-eos", *there)
    streamed = tokenmill("enqueue", "Hello", "--max-tokens", "6", "--ignore-eos", "--stream", *there)
    assert whole.returncode == streamed.returncode == 0, whole.stderr + streamed.stderr
    assert whole.stdout == streamed.stdout
    assert len(whole.stdout.strip()) > 0
    done = tokenmill("run", "-", *there, stdin=jsonl(prompts(5)))
    assert done.returncode == 0, done.stderr
    assert len(read(done.stdout)) == 5


def test_info_shows_the_worker_and_the_counters(worker: str, url: str) -> None:
    tokenmill("enqueue", "Hello", "--max-tokens", "2", "--redis", url, "--queue", worker)
    info = json.loads(tokenmill("info", "--json", "--redis", url, "--queue", worker).stdout)
    assert set(info) == {"queue", "broker", *QueueInfo._fields}
    assert (info["queue"], info["waiting"], info["running"]) == ("served", 0, 0)
    [status] = info["workers"]
    assert {"name", "age_ms", "busy", "slots", "state", "model", "pid", "requests", "output_tokens"} <= set(status)
    assert info["stats"]["enqueued"] >= 1
    assert "served: 0 waiting" in tokenmill("info", "--redis", url, "--queue", worker).stdout


def test_enqueue_without_a_worker_says_so_and_leaves_the_request_on_the_queue(url: str) -> None:
    there = ("--redis", url, "--queue", "unserved")
    done = tokenmill("enqueue", "Hello", "--timeout", "0.3", "--id", "a", *there)
    assert done.returncode == 1
    assert "no worker is alive on queue `unserved`" in done.stderr
    assert "no reply to request `a` in time; it stays on the queue" in done.stderr
    assert json.loads(tokenmill("info", "--json", *there).stdout)["waiting"] == 1
