"""Tiny models for llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokenmill.worker.models import LoadedModel, load_model

from ..backends import write_llamacpp


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedModel]:
    """Loads the tiny model with changes to its file."""
    return partial(_load, tmp_path / "tiny.gguf")


def _load(path: Path, changes: dict[str, Any] | None = None, **options: int) -> LoadedModel:
    return load_model(f"llamacpp:{write_llamacpp(path, changes)}", **{"slots": 4, **options})
