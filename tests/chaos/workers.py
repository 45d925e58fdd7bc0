"""The worker processes of a run, and the supervisor that starts them again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .counted_worker import COUNTER, POISONED

_HERE = Path(__file__).parent
_UNREACHABLE = 3  # exit code of a worker that finds no broker when it starts
# Before it has installed its handlers, a signal ends a process at once.
_ENDINGS = {signal.SIGKILL: {-signal.SIGKILL}, signal.SIGTERM: {0, -signal.SIGTERM}}
_BACKOFF_S = 0.3
_HOPELESS = 10
_LEAVE_S = 30.0


@dataclass(slots=True)
class _Life:
    process: subprocess.Popen[bytes]
    log: Path
    allowed: set[int] = field(default_factory=lambda: {_UNREACHABLE, POISONED})  # exit statuses that are no surprise


class Workers:
    """``count`` worker processes, each with as many lives as it takes."""

    def __init__(self, argv: Sequence[str], count: int, folder: Path) -> None:
        self.problems: list[str] = []  # lives that ended in a way they must not
        self.exits: Counter[str] = Counter()
        self._argv = list(argv)
        self._folder = folder
        self._n_lives = 0
        self._lives = [self._start() for _ in range(count)]
        self._restart_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def victims(self) -> list[int]:
        """Workers that run; some of them may be stopped or draining."""
        return [worker for worker, life in enumerate(self._lives) if life.process.poll() is None]

    @property
    def hopeless(self) -> bool:
        """Whether so many have ended by themselves that the run tells nothing more."""
        return len(self.problems) >= _HOPELESS

    @property
    def pids(self) -> list[int]:
        return [life.process.pid for life in self._lives]

    def signal(self, worker: int, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        self._lives[worker].allowed |= _ENDINGS.get(number, set())
        self._lives[worker].process.send_signal(number)

    def supervise(self) -> None:
        """Start again what has ended."""
        for worker, life in enumerate(self._lives):
            if worker in self._restart_at:
                if time.monotonic() >= self._restart_at[worker]:
                    del self._restart_at[worker]
                    self._lives[worker] = self._start()
            elif (status := life.process.poll()) is not None:
                self._note_end(life, status)
                self._restart_at[worker] = time.monotonic() + (0.0 if status <= 0 else _BACKOFF_S)

    def wake(self) -> None:
        """Let every stopped worker go on."""
        for life in self._lives:
            life.process.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """Drain all of them, and wait until they have gone."""
        for worker in range(len(self)):
            self.signal(worker, signal.SIGTERM)
        for life in self._lives:
            try:
                self._note_end(life, life.process.wait(_LEAVE_S))
            except subprocess.TimeoutExpired:
                self.problems.append(f"a worker did not drain within {_LEAVE_S:.0f} s, see {life.log}")

    def kill(self) -> None:
        """End what is left, whatever state it is in."""
        for life in self._lives:
            life.process.kill()
            life.process.wait()

    def tokens_generated(self) -> int:
        """Output tokens that all lives together have computed."""
        return sum(int(np.fromfile(path, np.int64)[0]) for path in self._folder.glob("worker-*.tokens"))

    def tracebacks(self) -> list[str]:
        """Logs in which a worker told of a bug."""
        logs = sorted(self._folder.glob("worker-*.log"))
        return [f"a traceback in {log}" for log in logs if "Traceback" in log.read_text(errors="replace")]

    def _start(self) -> _Life:
        self._n_lives += 1
        counter, log = (self._folder / f"worker-{self._n_lives:04d}.{kind}" for kind in ("tokens", "log"))
        counter.write_bytes(bytes(8))
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                self._argv,
                env={**os.environ, COUNTER: str(counter), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )
        return _Life(process, log)

    def _note_end(self, life: _Life, status: int) -> None:
        self.exits[_describe(status)] += 1
        if status not in life.allowed:
            said = life.log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            self.problems.append(f"a worker ended by itself ({_describe(status)}), saying: {said[-1]}")


def our_worker(
    url: str, queue: str, *, slots: int, delay_ms: float, lease_ms: int, checkpoint_tokens: int
) -> list[str]:
    """Command line of ``tokenmill worker`` with the counted toy model."""
    # -P: the folder of the script is no place to import from
    command = [sys.executable, "-P", str(_HERE / "counted_worker.py"), "worker", "--parent-pid", str(os.getpid())]
    command += ["--redis", url, "--queue", queue, "--model", f"toy:delay_ms={delay_ms}", "--slots", str(slots)]
    command += ["--lease-ms", str(lease_ms), "--checkpoint-tokens", str(checkpoint_tokens)]
    return [*command, "--drain-grace", "0.3"]  # some requests outlast it


def blpop_worker(url: str, queue: str, *, delay_ms: float) -> list[str]:
    """Command line of the control."""
    return [sys.executable, "-P", str(_HERE / "blpop_worker.py"), url, queue, str(delay_ms)]


def _describe(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
