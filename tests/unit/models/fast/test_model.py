"""The fast backend as a whole: close to float32, the same bits in any company, and a reason where it is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.fast import cpu
from tokenmill.worker.models.fast.model import FastLlamaModel
from tokenmill.worker.models.llama_numpy import NumpyLlamaModel

from ..backends import forward
from ..conftest import write
from ..quantized import write_quantized

needs_kernels = pytest.mark.skipif(cpu.instruction_set() is None, reason="there are no kernels for this processor")
PROMPT = [5, 9, 200, 17, 17, 3, 120, 44, 90, 12, 7, 31, 31, 2, 250, 66, 8, 19, 101, 77]


def load(path: Path, backend: str, **options: int) -> Model:
    return load_model(f"gguf:{path}", slots=4, backend=backend, **options).model


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_are_close_to_those_in_float32(tmp_path: Path, kind: str) -> None:
    path = write_quantized(tmp_path / "tiny.gguf", kind)
    fast, exact = (forward(load(path, backend), (0, 0, PROMPT))[0] for backend in ("fast", "numpy"))
    assert np.corrcoef(fast, exact)[0, 1] > 0.999  # activations are rounded to 8 bits
    np.testing.assert_allclose(fast, exact, atol=0.15 * exact.std())


@needs_kernels
def test_matrices_may_differ_in_type(tmp_path: Path) -> None:
    kinds = {"attn_v": "Q8_0", "ffn_down": "Q5_1", "output": "Q8_0", "token_embd": "Q5_0"}
    path = write_quantized(tmp_path / "tiny.gguf", kinds)
    fast, exact = (forward(load(path, backend), (0, 0, PROMPT))[0] for backend in ("fast", "numpy"))
    assert np.corrcoef(fast, exact)[0, 1] > 0.999


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_gets_the_same_bits_alone_and_in_batches(tmp_path: Path, threads: int) -> None:
    path = write_quantized(tmp_path / "tiny.gguf")
    single, model = load(path, "fast"), load(path, "fast", threads=threads)
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
    alone = [np.array(forward(single, (0, 0, prompt))[0]) for prompt in prompts]
    together = forward(model, *((i, 0, prompt) for i, prompt in enumerate(prompts)))
    np.testing.assert_array_equal(together, np.stack(alone))
    for start in range(len(PROMPT)):  # token by token, while the others bring all of theirs
        rows = [(0, start, prompts[0][start : start + 1]), *((i, 0, prompts[i]) for i in range(1, 4))]
        together = forward(model, *rows)
    np.testing.assert_array_equal(together, np.stack(alone))


@needs_kernels
def test_the_fast_backend_is_chosen_where_it_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load_model(f"gguf:{write_quantized(tmp_path / 'tiny.gguf')}", slots=2)
    assert isinstance(loaded.model, FastLlamaModel)
    assert loaded.fingerprint.startswith("fast-llama:")
    assert f"computing with kernels for {cpu.instruction_set()}" in caplog.text


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output": "F16"}, "tensor output.weight is of type F16"),
        (
            {"llama.attention.head_count": 8, "llama.attention.key_length": 8},
            "its heads of 8 dimensions are no multiple of 16",
        ),
        ({"llama.feed_forward_length": 48}, "its feed-forward width of 48 is no multiple of 32"),
    ],
    ids=["type", "heads", "width"],
)
def test_what_the_kernels_cannot_compute_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], reason: str
) -> None:
    more = {key: value for key, value in changes.items() if key.startswith("llama.")}
    path = write_quantized(tmp_path / "tiny.gguf", changes, more)
    with pytest.raises(ModelLoadError, match=f"the fast backend cannot compute .*{reason}"):
        load(path, "fast")


def test_other_files_and_processors_get_numpy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(load(write(tmp_path / "float.gguf"), "auto"), NumpyLlamaModel)
    monkeypatch.setattr(cpu, "instruction_set", lambda: None)
    assert isinstance(load(write_quantized(tmp_path / "quantized.gguf"), "auto"), NumpyLlamaModel)
    assert [message for message in caplog.messages if message.startswith("computing with NumPy: ")] == [
        message for message in caplog.messages if "computing" in message
    ]


def test_numpy_can_be_asked_for(tmp_path: Path) -> None:
    assert isinstance(load(write_quantized(tmp_path / "tiny.gguf"), "numpy"), NumpyLlamaModel)


@needs_kernels
def test_a_budget_below_one_request_shortens_contexts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wide = {"llama.context_length": 100_000}
    path = write_quantized(tmp_path / "tiny.gguf", more=wide)
    model = load(path, "fast", max_context=100_000, kv_memory_mib=1)
    assert model.max_context == 2**20 // (2 * 2 * 2 * 32)  # keys and values of two layers, two heads of 16, float16
    assert "--kv-memory-mib" in caplog.text


AVX2 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt"


@pytest.mark.skipif(cpu.instruction_set() != cpu.AVX512, reason="AVX2 is what is tested anyway")
def test_processors_with_avx2_have_kernels_of_their_own() -> None:
    here = Path(__file__).parent
    whole = f"{here / 'test_model.py'}::{test_a_request_gets_the_same_bits_alone_and_in_batches.__name__}"
    tests = [f"{here / 'test_kernels.py'}", whole]
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, env=environment, cwd=Path.cwd(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout
