"""A password in the URL of the broker appears nowhere: not in what commands say, in `info`, in what objects print."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tokenmill.producer.client import Client
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError, UsageError

SECRET = "hunter2@/:%"  # noqa: S105
SECRETS = (SECRET, quote(SECRET, safe=""), "hunter2")
LINES = Path(__file__).parents[3] / "examples/prompts.jsonl"
COMMANDS = [("worker", "--model", "toy"), ("enqueue", "mill"), ("info", "--json"), ("-v", "info"), ("run", str(LINES))]


@pytest.fixture(scope="module", autouse=True)
def password(admin: Any) -> Iterator[None]:
    """The broker wants a password, and the tests' own connection has given it."""
    admin.config_set("requirepass", SECRET)
    admin.execute_command("AUTH", SECRET)
    yield
    admin.config_set("requirepass", "")


@pytest.fixture
def locked(url: str) -> str:
    """The URL that opens the broker."""
    return url.replace("redis://", f"redis://:{quote(SECRET, safe='')}@")


def _keeps_quiet(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_password_is_one_line_without_it(
    command: tuple[str, ...], url: str, tokenmill: Callable[..., Any]
) -> None:
    said = tokenmill(url.replace("redis://", "redis://user:hunter2@"), *command)
    assert said.returncode == 3
    line = said.stderr.splitlines()[-1]
    assert line.startswith("tokenmill: error: no broker at 127.0.0.1:")
    assert "password" in line
    if "-v" not in command:
        assert said.stderr.splitlines() == [line]
    _keeps_quiet(said.stdout + said.stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_password_is_one_line_that_says_so(
    command: tuple[str, ...], url: str, tokenmill: Callable[..., Any]
) -> None:
    said = tokenmill(url, *command)
    assert said.returncode == 3
    assert "Authentication required" in said.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "where", ["127.0.0.1:{port}/0", "127.0.0.1:{port}/0?socket_timeout=x", "127.0.0.1:99999/0", "[::1"]
)
@pytest.mark.parametrize("verbose", [(), ("-v",)])
def test_a_broker_that_is_not_there_is_told_without_the_password(
    where: str, verbose: tuple[str, ...], tokenmill: Callable[..., Any]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://user:hunter2@{where.format(port=nobody.getsockname()[1])}"
        said = tokenmill(url, *verbose, "info")
    assert said.returncode in (2, 3)
    _keeps_quiet(said.stdout + said.stderr)


def test_the_right_password_works_and_is_shown_nowhere(
    locked: str, tmp_path: Path, admin: Any, start_worker: Callable[..., Any], tokenmill: Callable[..., Any]
) -> None:
    worker = start_worker(locked, "-v")
    said = [tokenmill(locked, "-v", *command) for command in (("enqueue", "mill"), ("info",), ("info", "--json"))]
    assert [command.returncode for command in said] == [0, 0, 0]
    keys = [key.decode() for key in admin.scan_iter("*")]
    status = [str(admin.get(key)) for key in keys if ":worker:" in key]
    assert status
    command_line = Path(f"/proc/{worker.process.pid}/cmdline")
    if command_line.exists():
        _keeps_quiet(command_line.read_text())
    worker.stop()
    _keeps_quiet("\n".join([worker.said(), *keys, *status, *(command.stdout + command.stderr for command in said)]))


def test_objects_and_their_errors_show_host_and_port_alone(locked: str, url: str) -> None:
    broker = Broker(connect(locked), "q")
    wrong = Broker(connect(url.replace("redis://", "redis://user:hunter2@")), "q")
    with pytest.raises(BrokerUnreachableError) as refused:
        wrong.check()
    with pytest.raises(UsageError) as misspelt:
        connect("redis://user:hunter2@host:port")
    with pytest.raises(TokenmillError) as full:
        Client(broker).submit("")
    shown = [repr(thing) for thing in (broker, wrong, Client(broker), broker._redis, refused.value, misspelt.value)]
    _keeps_quiet("\n".join([*shown, *map(str, (refused.value, refused.value.__cause__, misspelt.value, full.value))]))
    for thing in (broker, wrong):
        thing._redis.close()
