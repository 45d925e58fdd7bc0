"""The llama.cpp backend beyond what all backends do: its memory to the last cell, its failures, its log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.engine.model import Model
from tokenmill.worker.models import LoadedModel, load_model

from ..backends import forward, needs_llamacpp
from ..conftest import HEAD_DIM, VOCABULARY, metadata
from .architectures import WINDOW, write_gemma3, write_mamba

pytestmark = needs_llamacpp()

PROMPT = [5, 9, 200, 17, 17, 3, 120, 44, 90, 12]
TOLERANCE = 1e-2


@pytest.fixture
def model(load: Callable[..., LoadedModel]) -> Any:
    return load().model


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_it_computes_what_the_numpy_backend_computes(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    model = load().model
    exact = load_model(f"gguf:{tmp_path / 'tiny.gguf'}", slots=4, backend="numpy").model
    close(forward(model, (0, 0, PROMPT)), forward(exact, (0, 0, PROMPT)))


def test_the_account_of_the_memory_is_right_to_the_last_cell(model: Any) -> None:
    prompts = [[(i * 7 + j) % 250 for j in range(64)] for i in range(4)]
    for context, prompt in enumerate(prompts):
        forward(model, (context, 0, prompt))
    nobody = np.zeros(0, np.int32)
    assert model.shortage(nobody, nobody) == 0  # 4 slots of 64 tokens
    assert model.share(0, 5, 40) == 40
    with pytest.raises(MemoryError, match="raise --kv-memory-mib"):
        forward(model, (5, 40, PROMPT))
    model.truncate(1, 54)
    expected = forward(model, (5, 40, PROMPT))
    assert model.shortage(nobody, nobody) == 0
    model.truncate(0, 0)
    assert model.shortage(nobody, nobody) == -24  # the rest is shared
    close(forward(model, (0, 0, prompts[3][:24])), forward(model, (3, 23, prompts[3][23:24])))
    model.truncate(2, 0)
    close(forward(model, (2, 0, prompts[0][:40] + PROMPT)), expected)


def test_requests_that_outgrow_the_memory_lose_nothing(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs(batcher: ContinuousBatcher) -> list[list[int]]:
        for i in range(8):
            batcher.submit([*PROMPT, *PROMPT, i], max_tokens=42, ignore_eos=True)
        return [finished.output for finished in sorted(batcher.run(), key=lambda finished: finished.handle)]

    expected = outputs(ContinuousBatcher(load(slots=8).model, 8))
    monkeypatch.setattr("tokenmill.worker.models.llamacpp.model._bytes_per_token", lambda *_: 1 << 12)
    small: Any = load(slots=8, kv_memory_mib=1).model
    nobody = np.zeros(0, np.int32)
    assert small.shortage(nobody, nobody) == -256  # tokens, where the requests need 8 x 63, of which they share 20
    batcher = ContinuousBatcher(small, 8)
    assert outputs(batcher) == expected
    assert batcher.n_preempted


@pytest.mark.parametrize("outcome", [2, -3, "interrupt"])
def test_after_a_failed_step_every_context_goes_on(
    model: Model, monkeypatch: pytest.MonkeyPatch, outcome: int | str
) -> None:
    from tokenmill.worker.models.llamacpp.session import llama

    expected = forward(model, (2, 0, PROMPT)), forward(model, (3, 0, PROMPT[4:]))
    forward(model, (0, 0, PROMPT[:6]))
    real = llama.llama_decode

    def failing(*arguments: Any) -> int:
        """Fails with what it has computed in its memory."""
        assert real(*arguments) == 0
        if isinstance(outcome, str):
            raise KeyboardInterrupt
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_decode", failing)
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            forward(model, (0, 6, PROMPT[6:]), (1, 0, PROMPT[4:]))
    found = forward(model, (0, 6, PROMPT[6:]), (1, 0, PROMPT[4:]))
    close(found, np.concatenate(expected))


def test_a_step_may_take_several_calls_of_llama_cpp(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 0, PROMPT), (1, 0, PROMPT[:1]), (2, 0, PROMPT[3:])]
    expected = forward(model, *rows)
    monkeypatch.setattr("tokenmill.worker.models.llamacpp.session.TOKENS_AT_ONCE", 4)
    close(forward(model, *rows), expected)


def test_a_context_is_no_longer_than_that_of_training(load: Callable[..., LoadedModel]) -> None:
    assert load(max_context=2048).model.max_context == 64
    assert load(max_context=20).model.max_context == 20


def test_memory_for_less_shortens_the_contexts_and_says_so(
    load: Callable[..., LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    long = {"llama.context_length": 65536}
    model = load(long, max_context=65536, kv_memory_mib=1).model
    assert 1000 < (model.max_context or 0) < 20_000
    assert "raise --kv-memory-mib for longer" in caplog.text


def test_llama_cpp_is_silent_unless_asked(
    load: Callable[..., LoadedModel], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tokenmill"):
        load()
    assert capfd.readouterr() == ("", "")
    assert [record.message for record in caplog.records] == ["computing with llama.cpp on the processor"]
    with caplog.at_level(logging.DEBUG, "tokenmill"):
        load()
    assert "general.architecture str" in caplog.text


def test_the_fingerprint_is_that_of_the_file_and_the_backend(load: Callable[..., LoadedModel]) -> None:
    first, same, other = load(), load(), load({"llama.context_length": 128})
    assert first.fingerprint.startswith("llamacpp:")
    assert first.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"output_norm.weight": None}, "tensor 'output_norm.weight'"),
        ({"llama.rope.dimension_count": HEAD_DIM // 2}, "invalid n_rot: 4, expected 8"),
        ({"tokenizer.chat_template": "{% for %}"}, "the chat template is broken"),
    ],
    ids=["tensor", "rotation", "template"],
)
def test_a_file_that_llama_cpp_refuses_is_answered_with_its_reason(
    load: Callable[..., LoadedModel], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ModelLoadError, match=line) as refused:
        load(changes)
    assert "\n" not in str(refused.value)
    load()


def test_a_file_that_is_missing_or_something_else_is_named(tmp_path: Path) -> None:
    text = tmp_path / "readme.gguf"
    text.write_text("to be done")
    with pytest.raises(ModelLoadError, match=r"readme\.gguf is not a GGUF file"):
        load_model(f"llamacpp:{text}", slots=1)
    with pytest.raises(ModelLoadError, match=r"cannot read the model file .*nowhere\.gguf: No such file"):
        load_model(f"llamacpp:{tmp_path / 'nowhere.gguf'}", slots=1)


def test_sliding_windows_can_go_back_and_be_shared(tmp_path: Path) -> None:
    loaded = load_model(f"llamacpp:{write_gemma3(tmp_path / 'gemma.gguf')}", slots=4)
    model: Any = loaded.model
    prompt = PROMPT * 3  # many times as long as the window
    expected = forward(model, (0, 0, prompt))
    far = [*prompt[:-WINDOW], 99, *prompt[1 - WINDOW :]]
    assert not np.allclose(forward(model, (1, 0, far)), expected)
    model.truncate(0, 12)
    close(forward(model, (0, 12, prompt[12:])), expected)
    assert model.share(0, 2, 17) == 17
    close(forward(model, (2, 17, prompt[17:])), expected)


def test_a_file_without_vocabulary_takes_token_ids_only(load: Callable[..., LoadedModel]) -> None:
    bare = {key: None for key in metadata() if key.startswith("tokenizer.")}
    loaded = load(bare | {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": len(VOCABULARY)})
    assert loaded.tokenizer is None
    assert forward(loaded.model, (0, 0, PROMPT)).shape == (1, len(VOCABULARY))


def test_memory_that_cannot_go_back_is_refused(tmp_path: Path) -> None:
    path = write_mamba(tmp_path / "mamba.gguf")
    with pytest.raises(ModelLoadError, match="cannot go back to an earlier token"):
        load_model(f"llamacpp:{path}", slots=2)


@pytest.mark.parametrize(
    ("function", "answer", "line"),
    [
        ("llama_get_memory", None, "not a language model"),
        ("llama_model_has_encoder", True, "not a decoder-only language model"),
        ("llama_model_is_diffusion", True, "is a diffusion model"),
        ("llama_init_from_model", None, r"no room for .* tokens .*; lower --kv-memory-mib"),
        ("llama_decode", -3, r"could not compute a step of 1 tokens \(-3\)"),
    ],
)
def test_a_model_that_cannot_generate_here_is_refused(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, function: str, answer: object, line: str
) -> None:
    from tokenmill.worker.models.llamacpp.library import llama

    monkeypatch.setattr(llama, function, lambda *_: answer)
    with pytest.raises(ModelLoadError, match=line):
        load()


def test_more_slots_than_sequences_are_refused(load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(ModelLoadError, match=r"256 sequences at most; lower --slots"):
        load(slots=257)
    assert load(slots=256, max_context=2).model.n_contexts == 256  # type: ignore[attr-defined]
