"""SmolLM2 in the backends that round activations to 8 bits, against golden values of llama.cpp in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokenmill.worker.engine import Batch
from tokenmill.worker.engine.model import Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.fast.cpu import instruction_set
from tokenmill.worker.models.registry import smollm2_path

from ..unit.models.backends import needs_llamacpp

needs_kernels = pytest.mark.skipif(instruction_set() is None, reason="there are no kernels for this processor")


@pytest.fixture(
    scope="module",
    params=[pytest.param("fast", marks=needs_kernels), pytest.param("llamacpp", marks=needs_llamacpp())],
)
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "llamacpp":
        return load_model(f"llamacpp:{smollm2_path()}", slots=2, threads=2).model
    return load_model("smollm2", slots=2, backend=request.param).model


def logits(model: Model, tokens: np.ndarray, start: int) -> np.ndarray:
    """After one token more of the only context."""
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    row = model.forward(Batch(zero, zero + start, one, tokens[start : start + 1].astype(np.int32), one > 0))[0]
    return np.array(row)


def test_predictions_are_those_in_float32_but_for_close_calls(model: Model) -> None:
    with np.load(Path(__file__).parent / "data" / "golden_logits.npz") as golden:
        tokens, sample, exact, best = (golden[name] for name in ("tokens", "sample", "logits", "argmax"))
    found = np.stack([logits(model, tokens, position) for position in range(len(tokens))])
    error = found[:, sample] - exact
    error -= error.mean(1, keepdims=True)  # what all logits have in common changes no prediction
    assert np.sqrt((error**2).mean()) < 0.03 * exact.std()
    assert (found.argmax(1) == best).mean() > 0.93
