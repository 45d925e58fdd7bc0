"""One broker for each module, and a queue of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.shared.embedded import EmbeddedBroker

from .workplace import DEADLINE_S, Workplace, long_request


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def workplace(url: str, tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(url, tmp_path)
    yield workplace
    workplace.close()


@pytest.fixture(scope="module")
def undisturbed(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the long request when nothing happens to it."""
    workplace = Workplace(url, tmp_path_factory.mktemp("undisturbed"))
    workplace.start("toy")
    text = workplace.client.wait(long_request(workplace), DEADLINE_S).text
    workplace.close()
    assert len(text) == 200
    return text
