"""`tokenmill top` beside a worker, in a pipe and in a terminal, and through an outage of the broker."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.shared.broker import connect
from tokenmill.shared.keys import Keys

from ..chaos.server import Server, embedded_binary
from .workplace import DEADLINE_S, SLOW_TOY, Workplace, long_request, wait_for

TOP = (sys.executable, "-m", "tokenmill.shared.cli", "top")


class Terminal:
    """A command in a terminal of 60 columns and 12 lines."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
        os.set_blocking(self._ours, False)
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)

    def shows(self, text: str) -> bool:
        """Whether the text is in what has been drawn since the last look."""
        drawn = b""
        while True:
            try:
                if not (piece := os.read(self._ours, 65536)):
                    break
            except (BlockingIOError, OSError):
                break
            drawn += piece
        return text in drawn.decode(errors="ignore")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    server = Server(embedded_binary(), tmp_path, "always", seed=os.getpid())
    server.start()
    server.wait_ready()
    yield server
    server.kill()


def test_a_look_in_a_pipe_shows_the_slots_of_a_worker_as_info_does(workplace: Workplace) -> None:
    workplace.start(SLOW_TOY, "--slots", "3")
    long_request(workplace)
    wait_for(lambda: any(cell and cell[1] for cell in workplace.broker.info().workers[0].status["cells"]))
    options = ["--redis", workplace.url, "--queue", workplace.queue]
    look = subprocess.run([*TOP, *options], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    assert f"queue {workplace.queue}" in look
    assert "1 of 3 slots busy" in look
    assert "│    ·    │" in look
    assert "errors: none" in look
    assert "\x1b" not in look
    command = [*TOP[:-1], "info", "--json", *options]
    info = json.loads(subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True).stdout)
    [worker] = info["workers"]
    assert worker["cells"][0][1] > 0
    assert worker["cells"][1:] == [None, None]
    assert worker["output_tokens_per_s"] > 0


def test_in_a_terminal_it_goes_on_through_an_outage_until_ctrl_c(broker: Server) -> None:
    terminal = Terminal(*TOP, "--redis", broker.url, "--queue", "mine", "--interval", "0.1")
    try:
        wait_for(lambda: terminal.shows("no worker is alive"))
        broker.kill()
        wait_for(lambda: terminal.shows("the broker has been away for"))
        broker.start()
        broker.wait_ready()
        connect(broker.url).rpush(Keys("mine").requests, b"{}")
        wait_for(lambda: terminal.shows("1 waiting"))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(DEADLINE_S) == 0
    finally:
        terminal.close()


def test_without_a_broker_it_says_so_at_once() -> None:
    done = subprocess.run(
        [*TOP, "--redis", "redis://127.0.0.1:1/0"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 3
    assert done.stderr.startswith("tokenmill: error: no broker at 127.0.0.1:1")
