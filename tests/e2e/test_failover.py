"""A broker's machine dies and its replica takes over while workers run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.shared.errors import BrokerUnreachableError

from ..chaos.proxy import Proxy
from ..chaos.server import Server, embedded_binary
from .workplace import DEADLINE_S, Workplace, long_request, wait_for


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[Server]]:
    """A primary and its replica, in step."""
    brokers = []
    for name in ("primary", "replica"):
        (tmp_path / name).mkdir()
        broker = Server(embedded_binary(), tmp_path / name, "everysec", seed=random.randrange(2**32))
        broker.start()
        brokers.append(broker)
    primary, replica = brokers
    for broker in brokers:
        broker.wait_ready()
    with primary.connect() as admin, replica.connect() as follower:
        admin.config_set("repl-diskless-sync-delay", "0")
        follower.replicaof("127.0.0.1", primary.port)
        wait_for(lambda: _info(follower)["master_link_status"] == "up")
    yield brokers
    for broker in brokers:
        broker.kill()


def _info(admin: Any) -> dict[str, Any]:
    info: dict[str, Any] = admin.info("replication")
    return info


@pytest.fixture
def proxy(brokers: list[Server]) -> Iterator[Proxy]:
    """The address that clients know."""
    proxy = Proxy(brokers[0].port, seed=1)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def workplace(proxy: Proxy, tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(proxy.url, tmp_path)
    yield workplace
    workplace.close()


def test_a_replica_takes_over_while_requests_run_and_wait(
    brokers: list[Server], proxy: Proxy, workplace: Workplace, undisturbed: str
) -> None:
    primary, replica = brokers
    worker = workplace.start("toy:delay_ms=10", "--slots", "1")
    running = long_request(workplace, stream=True)
    wait_for(lambda: workplace.tokens(running) > 20)
    waiting = long_request(workplace)
    with primary.connect() as admin:
        wait_for(lambda: admin.wait(1, 1000) == 1)  # what was accepted by now is with the replica

    primary.kill()
    proxy.move(replica.port)
    with pytest.raises(BrokerUnreachableError, match="read only"):
        wait_for(lambda: _enqueue(workplace))  # until it is told that it is the primary now
    with replica.connect() as admin:
        admin.replicaof("NO", "ONE")

    reply = workplace.client.wait(running, DEADLINE_S)
    assert (reply.text, reply.deliveries) == (undisturbed, 1)
    assert "".join(entry.text for entry in workplace.broker.read_tokens(running)) == undisturbed
    assert workplace.client.wait(waiting, DEADLINE_S).text == undisturbed
    assert worker.poll() is None


def _enqueue(workplace: Workplace) -> bool:
    """Try to enqueue; False while nobody answers."""
    try:
        workplace.broker.enqueue("late", b'{"id":"late","prompt":"mill"}')
    except BrokerUnreachableError as error:
        if "read only" in str(error):
            raise
        return False
    return True
