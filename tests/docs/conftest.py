"""Brokers for the tests here: one without workers for each module, and one with the real model for all of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.embedded import EmbeddedBroker

LOADING_S = 60.0


@pytest.fixture(scope="module")
def toy_broker() -> Iterator[str]:
    """Address of a real broker without workers."""
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture(scope="session")
def real_model() -> Iterator[str]:
    """Address of a broker with one worker on the real model, which serves the default queue."""
    with EmbeddedBroker() as embedded:
        command = [sys.executable, "-m", "tokenmill.shared.cli", "-q", "worker", "--redis", embedded.url]
        worker = subprocess.Popen(command)
        broker = Broker(connect(embedded.url))
        deadline = time.monotonic() + LOADING_S
        while not broker.info().workers:
            assert worker.poll() is None, "the worker ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield embedded.url
        worker.kill()
        worker.wait()
