"""One worker process as its supervisor sees it: started, watched, started again after a crash, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

ERROR_PREFIX = "tokenmill: error: "
MAX_CRASHES = 5  # one after another, each soon after a start
BACKOFF_S = 0.25  # before the first restart; doubles with each further crash
STEADY_S = 30.0  # a process that has run this long has started well
_TAIL_BYTES = 4096


class WorkerProcess:
    """A command line kept running in a session of its own, so that Ctrl-C in a terminal reaches only the owner.

    What it writes to stderr goes to an unlinked file: it never blocks, and nothing stays behind.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._argv = list(argv)
        self._clock = clock
        self._stderr = tempfile.TemporaryFile(mode="ab+", buffering=0)  # noqa: SIM115 (closed by kill)
        self._read = 0  # bytes of it that were read
        self._crashes = 0
        self._restart_at: float | None = None
        self.start()

    def start(self) -> None:
        """Start the process."""
        self._restart_at = None
        self._started = self._clock()
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the present incarnation."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process runs at this moment."""
        return self._process.poll() is None

    @property
    def hopeless(self) -> bool:
        """Whether it crashed too often to be started again."""
        return self._crashes >= MAX_CRASHES

    def ended(self) -> int | None:
        """Exit status (negative: a signal) when the process has ended since the last call, else None.

        Call ``restart_when_due`` to have it started again after its backoff.
        """
        if self._restart_at is not None or self.hopeless or (status := self._process.poll()) is None:
            return None
        now = self._clock()
        self._crashes = 1 if now - self._started >= STEADY_S else self._crashes + 1
        self._restart_at = now + BACKOFF_S * 2 ** (self._crashes - 1)
        return status

    def restart_when_due(self) -> None:
        """Start the process again if it has ended, its backoff is over and it is not hopeless."""
        if self._restart_at is not None and not self.hopeless and self._clock() >= self._restart_at:
            self.start()

    def new_lines(self) -> list[str]:
        """Whole lines that it wrote to stderr since the last call."""
        chunk = os.pread(self._stderr.fileno(), 1 << 20, self._read)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """The last line on its stderr: the reason, when it ended with an error."""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix(ERROR_PREFIX) if lines else ""

    def terminate(self) -> None:
        """Ask it to stop, and start it no more."""
        self._crashes = MAX_CRASHES
        if self.is_running():
            self._process.terminate()

    def kill(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for it to end, then kill it with everything it started."""
        try:
            self._process.wait(max(grace_s, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stderr.close()


def describe_exit(status: int) -> str:
    """What an exit status means: ``killed by SIGKILL, likely out of memory``, ``exit code 1``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    likely = {"SIGKILL": ", likely out of memory", "SIGSEGV": ", a bug in native code"}.get(name, "")
    return f"killed by {name}{likely}"


def processors() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def worker_argv(*arguments: str) -> list[str]:
    """Command line of ``tokenmill worker`` with this very interpreter."""
    return [sys.executable, "-m", "tokenmill.shared.cli", "worker", *arguments]
