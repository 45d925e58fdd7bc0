"""A queue of one's own and real worker processes on it."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.producer.client import Client
from tokenmill.shared.broker import Broker, connect

DEADLINE_S = 30.0
SLOW_TOY = "toy:delay_ms=10"


class Workplace:
    """One queue of its own, and the worker processes that a test starts on it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.queue = f"q-{uuid.uuid4().hex}"
        self.broker = Broker(connect(url), self.queue)
        self.client = Client(self.broker)
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def command(self, model: str, *options: str) -> list[str]:
        command = [sys.executable, "-m", "tokenmill.shared.cli", "worker", "--redis", self.url, "--queue", self.queue]
        return [*command, "--model", model, "--lease-ms", "600", *options]

    def start(self, model: str = SLOW_TOY, *options: str) -> subprocess.Popen[str]:
        """Start a worker and wait until it is registered."""
        process = self.start_unready(model, *options)
        wait_for(lambda: process.poll() is not None or process.pid in self.registered())
        return process

    def start_unready(self, model: str, *options: str) -> subprocess.Popen[str]:
        command = self.command(model, *options)
        with (self.folder / f"stderr-{len(self.processes)}").open("w") as stderr:
            process = subprocess.Popen(command, cwd=self.folder, stderr=stderr, text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def said(self, process: subprocess.Popen[str]) -> str:
        """What a worker wrote to stderr."""
        return (self.folder / f"stderr-{self.processes.index(process)}").read_text()

    def registered(self) -> list[int]:
        return [worker.status["pid"] for worker in self.broker.info().workers if "pid" in worker.status]

    def tokens(self, request_id: str) -> int:
        return sum(len(entry.token_ids) for entry in self.broker.read_tokens(request_id))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)


def long_request(workplace: Workplace, **fields: Any) -> str:
    """Submit a request that decodes for seconds: its reply is the same wherever and however often it is begun."""
    fields = {"max_tokens": 200, "logit_bias": {"256": -100}, "temperature": 1.0, "seed": 7, **fields}
    return workplace.client.submit("a long story", **fields)
