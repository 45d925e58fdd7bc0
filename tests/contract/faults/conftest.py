"""A server, a queue, and a proxy in between that loses what it is told to lose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.embedded import EmbeddedBroker

from ...chaos.proxy import Proxy

_numbers = itertools.count()


@pytest.fixture(scope="session")
def fault_url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def client(fault_url: str) -> Iterator[Any]:
    with connect(fault_url) as client:
        yield client


@pytest.fixture
def broker(client: Any) -> Broker:
    """The queue, reached directly."""
    return Broker(client, f"f{next(_numbers)}")


@pytest.fixture
def proxy(fault_url: str) -> Iterator[Proxy]:
    proxy = Proxy(int(fault_url.rpartition(":")[2].partition("/")[0]), seed=1)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def far(proxy: Proxy, broker: Broker) -> Iterator[Broker]:
    """The same queue, reached through the proxy."""
    with connect(proxy.url) as client:
        yield Broker(client, broker.keys.queue)
