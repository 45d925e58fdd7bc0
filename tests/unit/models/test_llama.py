"""The NumPy backend on a tiny model: right by a plain reference, and the same however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Batch, Model
from tokenmill.worker.models import load_model
from tokenmill.worker.models.llama_numpy import LlamaModel

SLOTS = 3
Row = tuple[int, int, list[int]]  # slot, start, tokens


def forward(model: Model, *rows: Row, complete: list[bool] | None = None) -> np.ndarray:
    slots, starts, tokens = zip(*rows, strict=True)
    return model.forward(
        Batch(
            contexts=np.array(slots, np.int32),
            starts=np.array(starts, np.int32),
            lengths=np.array([len(t) for t in tokens], np.int32),
            tokens=np.concatenate(tokens).astype(np.int32),
            complete=np.array(complete or [True] * len(rows)),
        )
    )


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
    return load_model(f"gguf:{path}", slots=SLOTS).model


def test_logits_are_those_of_a_plain_implementation(path: Path, model: Model) -> None:
    tokens = [5, 9, 200, 17, 17, 3, 120]
    np.testing.assert_allclose(forward(model, (1, 0, tokens))[0], reference(path, tokens), atol=1e-4)


def test_a_file_without_output_head_uses_its_embedding(write_gguf: Callable[..., Path]) -> None:
    embedding = np.random.default_rng(1).standard_normal((262, 32)).astype("f")
    untied = load_model(f"gguf:{write_gguf({'token_embd.weight': embedding, 'output.weight': embedding})}", slots=1)
    tied = load_model(f"gguf:{write_gguf({'token_embd.weight': embedding, 'output.weight': None})}", slots=1)
    np.testing.assert_array_equal(forward(tied.model, (0, 0, [7, 8])), forward(untied.model, (0, 0, [7, 8])))


def test_facts_come_from_the_metadata(path: Path, model: Model) -> None:
    assert (model.vocab_size, model.eos_token_ids, model.max_context) == (262, (0, 2), 64)
    assert load_model(f"gguf:{path}", slots=1, max_context=16).model.max_context == 16
    assert load_model(f"gguf:{path}", slots=1).name == "tiny"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_logits_do_not_depend_on_chunks_slots_or_neighbours(session_model: Model, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 261), min_size=1, max_size=12), min_size=1, max_size=SLOTS))
    slots = data.draw(st.permutations(range(SLOTS)))[: len(prompts)]
    alone = [forward(session_model, (0, 0, prompt))[0] for prompt in prompts]
    done, last = [0] * len(prompts), [np.empty(0)] * len(prompts)
    while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
        open_rows = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        ends = [data.draw(st.integers(done[i] + 1, len(prompts[i]))) for i in chosen]
        complete = [end == len(prompts[i]) for i, end in zip(chosen, ends, strict=True)]
        rows = [(slots[i], done[i], prompts[i][done[i] : end]) for i, end in zip(chosen, ends, strict=True)]
        logits = iter(forward(session_model, *rows, complete=complete))
        for i, end, ready in zip(chosen, ends, complete, strict=True):
            done[i] = end
            if ready:
                last[i] = next(logits)
    np.testing.assert_allclose(np.stack(last), np.stack(alone), atol=1e-4)


def test_a_step_may_be_repeated_and_taken_back(model: Model) -> None:
    expected = forward(model, (0, 0, [4, 5, 6, 7]))
    forward(model, (1, 0, [4, 5, 200, 201, 202]))
    forward(model, (1, 2, [6, 99]))  # an earlier start computes anew what lies after it
    model.truncate(1, 3)
    np.testing.assert_allclose(forward(model, (1, 3, [7])), expected, atol=1e-4)


def test_what_a_failed_step_may_have_overwritten_is_forgotten(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward(model, (0, 0, [4, 5, 6, 7]))
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "_ffn", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(model, (0, 2, [8]))
    with pytest.raises(ValueError, match="context 0 holds 2 tokens"):
        forward(model, (0, 3, [7]))
    np.testing.assert_allclose(forward(model, (0, 2, [6, 7])), forward(model, (1, 0, [4, 5, 6, 7])), atol=1e-4)


def test_rows_that_cannot_be_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="context 0 holds 0 tokens, but the row starts at 1"):
        forward(model, (0, 1, [5]))
    with pytest.raises(ValueError, match="exceeds the context of 64"):
        forward(model, (0, 0, [5] * 65))
    for token in (-1, 262):
        with pytest.raises(ValueError, match="from 0 to 261"):
            forward(model, (0, 0, [token]))
    forward(model, (0, 0, [5] * 64))


def test_a_batch_without_complete_rows_gives_no_logits(model: Model) -> None:
    assert forward(model, (0, 0, [5, 6]), complete=[False]).shape == (0, 262)


def test_extreme_activations_give_numbers(write_gguf: Callable[..., Path]) -> None:
    gate = np.full((48, 32), -100, np.float32)
    loaded = load_model(f"gguf:{write_gguf({'blk.0.ffn_gate.weight': gate})}", slots=1)
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
        load_model(f"gguf:{write_gguf(changes)}", slots=1)
    assert "\n" not in str(refused.value)


def test_another_architecture_is_refused_by_name(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'mamba'; only 'llama'"):
        load_model(f"gguf:{write_gguf(architecture='mamba')}", slots=1)


def test_a_missing_empty_foreign_or_cut_file_is_refused(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no such model file: .*nowhere\.gguf"):
        load_model(f"gguf:{tmp_path / 'nowhere.gguf'}", slots=1)
    whole = write_gguf().read_bytes()
    for content in (b"", b"not a model", b"GGUF", whole[:300], whole[: len(whole) // 2]):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"broken\.gguf is not a readable GGUF file"):
            load_model(f"gguf:{tmp_path / 'broken.gguf'}", slots=1)
