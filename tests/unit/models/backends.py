"""The backends under test, and how to hand rows to a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.worker.engine.model import Batch, Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.fast.cpu import instruction_set

from .conftest import HEAD_DIM, write
from .quantized import write_quantized

SLOTS = 4
Row = tuple[int, int, list[int]]  # context, start, tokens


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute, on a tiny model of ``SLOTS`` slots and contexts of 64 tokens."""

    name: str
    load: Callable[[Path], Model]  # from a folder for its files
    tolerance: float  # between logits of the same tokens computed in other steps


def numpy_model(folder: Path) -> Model:
    """The tiny model in NumPy, its threads dividing the work."""
    path = write(folder / "tiny.gguf")
    return load_model(f"gguf:{path}", slots=SLOTS, backend="numpy", threads=2).model


def fast_model(folder: Path, threads: int) -> Model:
    """A tiny quantised model, computed by kernels."""
    if instruction_set() is None:
        pytest.skip("there are no kernels for this processor")
    path = write_quantized(folder / "tiny.gguf")
    return load_model(f"gguf:{path}", slots=SLOTS, backend="fast", threads=threads).model


def needs_llamacpp() -> list[pytest.MarkDecorator]:
    """Skips what it marks where llama.cpp is not installed."""
    if importlib.util.find_spec("llama_cpp"):
        return []
    return [pytest.mark.skip("llama-cpp-python is not installed; make test-llamacpp installs it")]


def llamacpp_model(folder: Path) -> Model:
    """The tiny model in llama.cpp."""
    return load_model(f"llamacpp:{write_llamacpp(folder / 'tiny.gguf')}", slots=SLOTS).model


def write_llamacpp(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write the tiny model with whole heads rotated, as llama.cpp insists."""
    return write(path, {"llama.rope.dimension_count": HEAD_DIM, "rope_freqs.weight": None, **(changes or {})})


BACKENDS = [
    # Sums of float32 in another order differed by 1.1e-4 once in thousands of draws. The promise is that a token can
    # differ only where the two best logits are within 1e-3 of each other: half of that for each.
    Backend("numpy", numpy_model, 5e-4),
    Backend("fast", partial(fast_model, threads=1), 0),
    Backend("fast-2-threads", partial(fast_model, threads=2), 0),
    pytest.param(Backend("llamacpp", llamacpp_model, 1e-2), marks=needs_llamacpp()),
]


def forward(model: Model, *rows: Row, complete: list[bool] | None = None) -> np.ndarray:
    """Logits of one step with these rows."""
    contexts, starts, tokens = zip(*rows, strict=True)
    logits = model.forward(
        Batch(
            contexts=np.array(contexts, np.int32),
            starts=np.array(starts, np.int32),
            lengths=np.array([len(t) for t in tokens], np.int32),
            tokens=np.concatenate(tokens).astype(np.int32),
            complete=np.array(complete or [True] * len(rows)),
        )
    )
    return np.array(logits)  # a copy, for a model may use its array again
