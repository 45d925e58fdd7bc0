"""TLS: worker and client over ``rediss://``, with certificates made here, and none that does not hold."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.producer.client import Client

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, `ca`, two certificates by it, `here` and `elsewhere`, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ca", "other"):
        _openssl(
            folder,
            f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={authority} -keyout {authority}.key",
            authority,
        )
    for name, address in (("here", HOST), ("elsewhere", "127.9.9.9")):
        request = "req -x509 -newkey rsa:2048 -nodes -days 2 -CA ca.pem -CAkey ca.key"
        _openssl(folder, f"{request} -subj /CN={name} -addext subjectAltName=IP:{address} -keyout {name}.key", name)
    return folder


def _openssl(folder: Path, arguments: str, name: str) -> None:
    command = ["openssl", *arguments.split(), "-out", f"{name}.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


class TlsFront:
    """Speaks TLS before a broker that does not: the Valkey of the tests is built without it."""

    def __init__(self, upstream_port: int, certificate: Path) -> None:
        self._upstream_port = upstream_port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> TlsFront:
        self._thread.start()
        serve = asyncio.start_server(self._serve, HOST, 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(serve, self._loop).result()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"rediss://{HOST}:{port}/0"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(HOST, self._upstream_port)
        try:
            await asyncio.gather(_copy(reader, to_broker), _copy(from_broker, writer))
        except asyncio.CancelledError:
            pass
        finally:
            to_broker.transport.abort()
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@pytest.fixture
def front(url: str, certificates: Path) -> Iterator[TlsFront]:
    with TlsFront(int(url.rpartition(":")[2].partition("/")[0]), certificates / "here.pem") as front:
        yield front


def test_a_worker_and_a_client_meet_over_tls(
    front: TlsFront, certificates: Path, start_worker: Callable[..., Any]
) -> None:
    url = f"{front.url}?ssl_ca_certs={certificates / 'ca.pem'}"
    worker = start_worker(url)
    client = Client(url)
    assert client.generate("mill", timeout=20).error is None
    assert "".join(client.stream("mill", timeout=20)) == client.generate("mill", timeout=20).text
    worker.stop()
    client.broker._redis.close()


@pytest.mark.parametrize("command", [("worker", "--model", "toy"), ("enqueue", "mill"), ("info",)])
def test_an_unknown_authority_is_refused_in_one_line(
    command: tuple[str, ...], front: TlsFront, certificates: Path, tokenmill: Callable[..., Any]
) -> None:
    said = tokenmill(f"{front.url}?ssl_ca_certs={certificates / 'other.pem'}", *command)
    _is_refused(said, "certificate verify failed")


def test_without_a_named_authority_that_of_the_system_counts(front: TlsFront, tokenmill: Callable[..., Any]) -> None:
    _is_refused(tokenmill(front.url, "info"), "certificate verify failed")


def test_a_certificate_of_another_host_is_refused(url: str, certificates: Path, tokenmill: Callable[..., Any]) -> None:
    port = int(url.rpartition(":")[2].partition("/")[0])
    with TlsFront(port, certificates / "elsewhere.pem") as front:
        said = tokenmill(f"{front.url}?ssl_ca_certs={certificates / 'ca.pem'}", "info")
    _is_refused(said, "certificate verify failed")


def test_an_authority_that_cannot_be_read_is_told_in_one_line(front: TlsFront, tokenmill: Callable[..., Any]) -> None:
    said = tokenmill(f"{front.url}?ssl_ca_certs=/nowhere/ca.pem", "info")
    _is_refused(said, "No such file")


def test_plain_text_to_a_tls_port_is_told_in_one_line(front: TlsFront, tokenmill: Callable[..., Any]) -> None:
    _is_refused(tokenmill(front.url.replace("rediss", "redis"), "info"), "closed")


def _is_refused(said: Any, reason: str) -> None:
    [line] = said.stderr.splitlines()
    assert line.startswith(f"tokenmill: error: no broker at {HOST}:")
    assert reason in line
    assert said.returncode == 3
