"""A broker of its own for each module: users and passwords are set on it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from tokenmill.shared import cli
from tokenmill.shared.broker import connect
from tokenmill.shared.embedded import EmbeddedBroker

from ...waiting import eventually

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture(scope="module")
def admin(url: str) -> Iterator[redis.Redis]:
    with connect(url) as client:
        yield client


def _argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tokenmill.shared.cli", *arguments]


def _environment(url: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    return {**clean, "TOKENMILL_REDIS": url, "TOKENMILL_LEASE_MS": "600"}


class Said(NamedTuple):
    """What a command wrote, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tokenmill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """Runs one command, with the URL of the broker in the environment; workers, which take over signals, elsewhere."""
    logger = logging.getLogger("tokenmill")
    before = logger.handlers, logger.level, logger.propagate

    def run(url: str, *arguments: str) -> Said:
        if "worker" in arguments:
            ended = subprocess.run(
                _argv(*arguments), env=_environment(url), capture_output=True, text=True, timeout=TIMEOUT_S
            )
            return Said(ended.returncode, ended.stdout, ended.stderr)
        monkeypatch.setenv("TOKENMILL_REDIS", url)
        capsys.readouterr()
        return Said(cli.run(arguments), *capsys.readouterr())

    yield run
    logger.handlers, logger.level, logger.propagate = before


class RunningWorker:
    """A worker process and what it writes."""

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        self._stderr = folder / "worker-stderr"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                _argv("worker", "--model", "toy", *options), env=_environment(url), stderr=stderr
            )
        eventually(lambda: self.process.poll() is not None or "is ready" in self.said())
        assert self.process.poll() is None, self.said()

    def said(self) -> str:
        return self._stderr.read_text()

    def stop(self) -> None:
        """Drain it; it must end well."""
        self.process.terminate()
        assert self.process.wait(TIMEOUT_S) == 0, self.said()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., RunningWorker]]:
    started: list[RunningWorker] = []

    def start(url: str, *options: str) -> RunningWorker:
        started.append(RunningWorker(url, tmp_path, *options))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()
