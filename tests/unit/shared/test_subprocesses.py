"""A worker process under supervision: restarts with backoff, last words, and an end without survivors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tokenmill.shared.subprocesses import (
    BACKOFF_S,
    MAX_CRASHES,
    STEADY_S,
    WorkerProcess,
    describe_exit,
    processors,
)

from ...waiting import alive, eventually


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(clock: Clock) -> Iterator[Callable[[str], WorkerProcess]]:
    """Starts Python code as a supervised process, and kills it in the end."""
    started: list[WorkerProcess] = []

    def launch(code: str) -> WorkerProcess:
        started.append(WorkerProcess([sys.executable, "-c", code], clock=clock))
        return started[-1]

    yield launch
    for process in started:
        process.terminate()
        process.kill(0.0)


SLEEP = "import time; time.sleep(60)"


def test_a_crashed_process_starts_again_after_its_backoff(start: Callable[[str], WorkerProcess], clock: Clock) -> None:
    process = start(SLEEP)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    assert eventually(process.ended) == -signal.SIGKILL
    assert process.ended() is None  # told once
    process.restart_when_due()
    assert not process.is_running()
    clock.now += BACKOFF_S
    process.restart_when_due()
    assert process.is_running()
    assert process.pid != first


def test_the_backoff_doubles_until_the_process_is_given_up(start: Callable[[str], WorkerProcess], clock: Clock) -> None:
    process = start("raise SystemExit(7)")
    for crash in range(MAX_CRASHES - 1):
        assert eventually(process.ended) == 7
        clock.now += BACKOFF_S * 2**crash * 0.9
        process.restart_when_due()
        assert not process.is_running()
        clock.now += BACKOFF_S * 2**crash * 0.2
        process.restart_when_due()
    assert eventually(process.ended) == 7
    assert process.hopeless
    clock.now += 3600
    process.restart_when_due()
    assert not process.is_running()


def test_a_process_that_ran_for_long_is_not_held_to_old_crashes(
    start: Callable[[str], WorkerProcess], clock: Clock
) -> None:
    process = start(SLEEP)
    for _ in range(MAX_CRASHES + 1):
        clock.now += STEADY_S
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: process.ended() is not None)
        clock.now += BACKOFF_S
        process.restart_when_due()
        assert process.is_running()


def test_the_last_words_are_the_last_line_without_our_prefix(start: Callable[[str], WorkerProcess]) -> None:
    process = start("import sys; sys.exit('first\\ntokenmill: error: no such model\\n')")
    eventually(lambda: process.ended() is not None)
    assert process.last_words() == "no such model"


def test_new_lines_are_whole_lines_told_once(start: Callable[[str], WorkerProcess]) -> None:
    process = start("import sys; sys.stderr.write('one\\ntwo\\nhalf'); sys.stderr.flush()")
    eventually(lambda: process.ended() is not None)
    assert process.new_lines() == ["one", "two"]
    assert process.new_lines() == []


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(
    start: Callable[[str], WorkerProcess],
) -> None:
    process = start(
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]);"
        "print(child.pid, file=sys.stderr, flush=True); time.sleep(60)"
    )
    child = int(eventually(process.new_lines)[0])
    process.terminate()
    process.kill(0.05)
    assert not process.is_running()
    eventually(lambda: not alive(child))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL, likely out of memory"),
        (-11, "killed by SIGSEGV, a bug in native code"),
        (-15, "killed by SIGTERM"),
        (-200, "killed by signal 200"),
    ],
)
def test_exit_statuses_are_decoded(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_there_is_a_processor() -> None:
    assert processors() >= 1
