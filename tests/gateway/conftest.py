"""A gateway process in front of a worker on the real model, and OpenAI's own client."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tokenmill.shared.embedded import EmbeddedBroker

from ..e2e.workplace import Workplace, wait_for

KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}


class Gateway:
    """One process of ``tokenmill serve``."""

    def __init__(self, workplace: Workplace, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "tokenmill.shared.cli", "serve", "--redis", workplace.url]
        command += ["--queue", workplace.queue, "--port", str(self.port)]
        command += ["--files-dir", str(workplace.folder / "files"), *options]
        self._log = workplace.folder / f"gateway-{self.port}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, text=True)
        wait_for(lambda: self.process.poll() is not None or self._is_ready())
        assert self.process.poll() is None, self._log.read_text()

    def client(self, name: str = "alice", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[name], max_retries=0, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=1):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@pytest.fixture(scope="package")
def keys() -> str:
    return ",".join(f"{name}:{key}" for name, key in KEYS.items())


@pytest.fixture(scope="package")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A queue with one worker on the real model."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    with EmbeddedBroker() as embedded:
        workplace = Workplace(embedded.url, folder)
        workplace.start("smollm2", "--slots", "8")
        yield workplace
        workplace.close()


@pytest.fixture(scope="package")
def gateway(workplace: Workplace, keys: str) -> Iterator[Gateway]:
    gateway = Gateway(workplace, "--api-keys", keys)
    yield gateway
    gateway.close()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client
