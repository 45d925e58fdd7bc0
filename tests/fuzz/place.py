"""Where the fuzzing happens: a private broker and two worker processes that must not die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.embedded import EmbeddedBroker

from ..waiting import eventually
from .run import Fuzz, Outcome

WORKERS = 2


def fuzz(count: int, seed: int, folder: Path) -> Outcome:
    """Push ``count`` hostile payloads to two workers; raises AssertionError when one of them dies or says too much."""
    with EmbeddedBroker() as embedded, connect(embedded.url) as client:
        broker = Broker(client, "fuzz")
        with _workers(embedded.url, folder) as processes:
            eventually(lambda: len(broker.info().workers) == WORKERS)

            def alive() -> None:
                for process in processes:
                    assert process.poll() is None, f"a worker died with {process.returncode}: {_said(folder)}"

            outcome = Fuzz(broker, client, seed, alive=alive).run(count)
            alive()
            assert broker.info().stats.get("script_errors", 0) == 0
        assert [process.returncode for process in processes] == [0] * WORKERS
    assert "Traceback" not in _said(folder), _said(folder)
    return outcome


@contextmanager
def _workers(url: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    argv = [sys.executable, "-m", "tokenmill.shared.cli", "worker", "--redis", url, "--queue", "fuzz", "--model", "toy"]
    processes = []
    try:
        for number in range(WORKERS):
            with (folder / f"stderr-{number}").open("w") as stderr:
                processes.append(subprocess.Popen([*argv, "--slots", "32"], stderr=stderr))
        yield processes
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _said(folder: Path) -> str:
    return "\n".join(path.read_text()[-20_000:] for path in sorted(folder.glob("stderr-*")))
