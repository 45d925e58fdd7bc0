"""What the contract tests share."""

from __future__ import annotations

import pytest

from tokenmill.worker.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2 in NumPy with its real weights and sixteen slots; an error says how to install them."""
    return load_model("smollm2", slots=16, backend="numpy")
