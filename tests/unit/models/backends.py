"""The backends under test, and how to hand rows to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tokenmill.worker.engine.model import Batch, Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.fast.cpu import instruction_set

from .conftest import write
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


BACKENDS = [
    Backend("numpy", numpy_model, 1e-4),
    Backend("fast", partial(fast_model, threads=1), 0),
    Backend("fast-2-threads", partial(fast_model, threads=2), 0),
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
