"""The NumPy backend on a tiny model: right by a plain reference, and clear about files that it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Batch, CachingModel, Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.llama_numpy import even_shares
from tokenmill.worker.models.llama_pass import Pass

from .backends import forward

SLOTS = 3
load_numpy = partial(load_model, backend="numpy")


def reference(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits after the last token, by the textbook: one token, one head at a time, in float64."""
    w = {t.name: t.data.astype(float) for t in GGUFReader(path).tensors}
    x = w["token_embd.weight"][tokens]
    angles = np.outer(np.arange(len(tokens)), 500.0 ** (-np.array([0, 0.5])) / w["rope_freqs.weight"])

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def turn(x: np.ndarray) -> np.ndarray:
        out = x.copy()
        for pair in range(2):
            z = (x[:, 2 * pair] + 1j * x[:, 2 * pair + 1]) * np.exp(1j * angles[:, pair])
            out[:, 2 * pair], out[:, 2 * pair + 1] = z.real, z.imag
        return out

    for i in range(2):
        b = {name.split(".")[2]: value for name, value in w.items() if name.startswith(f"blk.{i}.")}
        h, heads = norm(x, b["attn_norm"]), []
        for head in range(4):
            q, kv = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
            scores = turn(h @ b["attn_q"][q].T) @ turn(h @ b["attn_k"][kv].T).T / np.sqrt(8)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ (h @ b["attn_v"][kv].T))
        x = x + np.concatenate(heads, -1) @ b["attn_output"].T
        h = norm(x, b["ffn_norm"])
        gate = h @ b["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ b["ffn_up"].T)) @ b["ffn_down"].T
    return norm(x[-1], w["output_norm.weight"]) @ w["output.weight"].T


@pytest.fixture
def path(write_gguf: Callable[..., Path]) -> Path:
    return write_gguf()


@pytest.fixture
def model(path: Path) -> Model:
    return load_numpy(f"gguf:{path}", slots=SLOTS).model


def test_logits_are_those_of_a_plain_implementation(path: Path, model: Model) -> None:
    tokens = [5, 9, 200, 17, 17, 3, 120]
    np.testing.assert_allclose(forward(model, (1, 0, tokens))[0], reference(path, tokens), atol=1e-4)


def test_a_file_without_output_head_uses_its_embedding(write_gguf: Callable[..., Path]) -> None:
    embedding = np.random.default_rng(1).standard_normal((262, 32)).astype("f")
    untied = load_numpy(f"gguf:{write_gguf({'token_embd.weight': embedding, 'output.weight': embedding})}", slots=1)
    tied = load_numpy(f"gguf:{write_gguf({'token_embd.weight': embedding, 'output.weight': None})}", slots=1)
    np.testing.assert_array_equal(forward(tied.model, (0, 0, [7, 8])), forward(untied.model, (0, 0, [7, 8])))


def test_facts_come_from_the_metadata(path: Path, model: Model) -> None:
    assert (model.vocab_size, model.eos_token_ids, model.max_context) == (262, (0, 2), 64)
    assert load_numpy(f"gguf:{path}", slots=1, max_context=16).model.max_context == 16
    assert load_numpy(f"gguf:{path}", slots=1).name == "tiny"


def test_a_shared_beginning_is_the_computed_one_bit_for_bit(model: Model) -> None:
    assert isinstance(model, CachingModel)
    forward(model, (0, 0, [4, 5, 6, 7, 8]))
    assert model.share(0, 9, 4) == 4
    np.testing.assert_array_equal(forward(model, (9, 4, [30, 31])), forward(model, (0, 4, [30, 31])))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_divide_wide_steps_and_narrow_ones(path: Path, model: Model, threads: int) -> None:
    divided = load_numpy(f"gguf:{path}", slots=SLOTS, threads=threads).model
    rng = np.random.default_rng(0)
    for lengths in ([1, 1, 1], [16, 16, 16], [40, 1, 20], [1, 1, 60], [60]):
        rows = [(i, 0, rng.integers(0, 262, n).tolist()) for i, n in enumerate(lengths)]
        complete = [True, *(i % 2 == 0 for i in range(1, len(rows)))]
        one, several = (forward(m, *rows, complete=complete) for m in (model, divided))
        np.testing.assert_allclose(several, one, atol=1e-4)


def test_what_a_failed_step_may_have_overwritten_is_forgotten(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward(model, (0, 0, [4, 5, 6, 7]))
    with monkeypatch.context() as patch:
        patch.setattr(Pass, "_ffn", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(model, (0, 2, [8]))
    with pytest.raises(ValueError, match="context 0 holds 2 tokens"):
        forward(model, (0, 3, [7]))
    np.testing.assert_allclose(forward(model, (0, 2, [6, 7])), forward(model, (1, 0, [4, 5, 6, 7])), atol=1e-4)


def test_extreme_activations_give_numbers(write_gguf: Callable[..., Path]) -> None:
    gate = np.full((48, 32), -100, np.float32)
    loaded = load_numpy(f"gguf:{write_gguf({'blk.0.ffn_gate.weight': gate})}", slots=1)
    assert np.isfinite(forward(loaded.model, (0, 0, [5, 6]))).all()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"blk.1.attn_k.weight": None}, "has no tensor blk.1.attn_k.weight"),
        ({"blk.0.attn_q.weight": np.zeros((32, 16), "f")}, r"attn_q.weight has shape \(32, 16\), expected \(32, 32\)"),
        ({"blk.0.attn_q.bias": np.zeros(32, "f")}, "tensors that are not supported: blk.0.attn_q.bias"),
        ({"llama.rope.scaling.type": "yarn"}, "scales RoPE by 'yarn'"),
        ({"llama.block_count": None}, "has no metadata llama.block_count"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer of type 't5'"),
        ({"tokenizer.ggml.pre": "qwen35"}, "cuts text by the rules 'qwen35'"),
        ({"tokenizer.chat_template": "{% for"}, "the chat template is broken"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_in_one_line(
    write_gguf: Callable[..., Path], changes: dict[str, object], line: str
) -> None:
    with pytest.raises(ModelLoadError, match=line) as refused:
        load_numpy(f"gguf:{write_gguf(changes)}", slots=1)
    assert "\n" not in str(refused.value)


def test_another_architecture_is_refused_by_name(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'mamba'; only 'llama'"):
        load_numpy(f"gguf:{write_gguf(architecture='mamba')}", slots=1)


def test_a_missing_empty_foreign_or_cut_file_is_refused(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no such model file: .*nowhere\.gguf"):
        load_numpy(f"gguf:{tmp_path / 'nowhere.gguf'}", slots=1)
    whole = write_gguf().read_bytes()
    for content in (b"", b"not a model", b"GGUF", whole[:300], whole[: len(whole) // 2]):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"broken\.gguf is not a readable GGUF file"):
            load_numpy(f"gguf:{tmp_path / 'broken.gguf'}", slots=1)


def batch_of(*lengths: int) -> Batch:
    """A batch of rows of these lengths."""
    n, tokens = len(lengths), np.zeros(sum(lengths), np.int32)
    return Batch(
        np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.array(lengths, np.int32), tokens, np.ones(n, np.bool_)
    )


@pytest.mark.parametrize("chunks", [[44, 44], [44], [30, 60, 20], []])
def test_threads_get_even_shares_of_a_step_that_mixes_chunks_and_decoding_rows(chunks: list[int]) -> None:
    batch = batch_of(*[1] * 40, *chunks)
    shares = even_shares(batch, 2)
    assert sorted(row for share in shares for row in share.tolist()) == list(range(len(batch)))
    first, second = (int(batch.lengths[share].sum()) for share in shares)
    assert abs(first - second) <= 4  # the 44 tokens of one row cannot be divided


def test_a_step_that_does_not_divide_evenly_stays_whole() -> None:
    assert [len(share) for share in even_shares(batch_of(1, 1, 100), 2)] == [3]
    assert [len(share) for share in even_shares(batch_of(*[1] * 20), 2)] == [20]
