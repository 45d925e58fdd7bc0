"""Brokers that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenmill.shared.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def toy_broker() -> Iterator[str]:
    """Address of a real broker without workers."""
    with EmbeddedBroker() as embedded:
        yield embedded.url
