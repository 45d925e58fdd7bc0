"""Real servers for the broker's tests, one queue of its own per test, and a check that no key is left behind."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from tokenmill.shared import embedded
from tokenmill.shared.broker import Broker, connect

from .driver import LEASE_MS, TTL_MS, Worker, unexpected_keys

# Valkey comes with the tests; Redis itself is tried wherever a redis-server is installed.
SERVERS = {"valkey": embedded._server_binary()}
if _redis_server := shutil.which("redis-server"):
    SERVERS["redis"] = Path(_redis_server)

_numbers = itertools.count()


@pytest.fixture(scope="session", params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of one real server for the whole session."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedded, "_server_binary", lambda: SERVERS[request.param])
            server = stack.enter_context(embedded.EmbeddedBroker())
        yield server.url


@pytest.fixture
def client(server_url: str) -> Iterator[Any]:
    with connect(server_url) as client:
        yield client


@pytest.fixture
def fake_client() -> Any:
    """fakeredis with the one function of Redis's Lua that it lacks."""
    server = fakeredis.FakeServer()
    client = fakeredis.FakeRedis(server=server, protocol=2)
    client.eval("return 1", 0)
    lua = server._lua_runtime.globals()  # type: ignore[attr-defined]
    lua[b"redis"][b"sha1hex"] = lambda text: hashlib.sha1(text).hexdigest().encode()  # noqa: S324
    return client


@pytest.fixture
def broker(client: Any) -> Iterator[Broker]:
    """A broker with an empty queue; afterwards every key left must belong there."""
    broker = Broker(client, f"q{next(_numbers)}")
    yield broker
    assert unexpected_keys(client, broker) == []


@pytest.fixture
def make_worker(broker: Broker) -> Callable[..., Worker]:
    return lambda name="w", slots=8: Worker(broker, name, slots)


@pytest.fixture
def worker(broker: Broker) -> Worker:
    return Worker(broker)


@pytest.fixture
def lapse(broker: Broker, client: Any) -> Callable[..., None]:
    """Let the leases of some requests (or of all) lapse now."""

    def lapse(*request_ids: str) -> None:
        for request_id in request_ids or client.zrange(broker.keys.leases, 0, -1):
            client.zadd(broker.keys.leases, {request_id: 1}, xx=True)

    return lapse


@pytest.fixture
def reclaim(broker: Broker) -> Callable[..., int]:
    return lambda limit=100: broker.reclaim(limit=limit, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS)
