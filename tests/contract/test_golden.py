"""SmolLM2 in NumPy against golden values of llama.cpp, written by ``benchmarks/golden_logits.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.worker.engine import Batch, ContinuousBatcher
from tokenmill.worker.models import LoadedModel
from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.registry import smollm2_path
from tokenmill.worker.models.tokenizer import GgufTokenizer

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-3
SLOTS = 16
GOLDEN_TOKENS: dict[str, Any] = json.loads((DATA / "golden_tokens.json").read_text())


@pytest.fixture(scope="module")
def golden() -> Mapping[str, np.ndarray]:
    """tokens [n]; argmax [n]; sample, the vocabulary ids that were kept; logits [n, sample]."""
    with np.load(DATA / "golden_logits.npz") as file:
        return dict(file)


class RelabelledFile(GgufFile):
    """The weights file under the name of another pre-tokenizer."""

    def __init__(self, pre: str) -> None:
        super().__init__(smollm2_path())
        self._pre = pre

    def get(self, key: str, default: Any) -> Any:
        return self._pre if key == "tokenizer.ggml.pre" else super().get(key, default)


@pytest.mark.parametrize("pre", GOLDEN_TOKENS)
def test_text_and_chats_get_the_tokens_of_llama_cpp(pre: str) -> None:
    tokenizer = GgufTokenizer(RelabelledFile(pre))
    for case in GOLDEN_TOKENS[pre]["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert b"".join(map(tokenizer.token_bytes, case["ids"])).decode() == case["text"]
    for case in GOLDEN_TOKENS[pre]["chats"]:
        assert tokenizer.encode_chat(case["messages"]) == case["ids"], case["messages"]


def test_the_prose_gets_the_tokens_of_llama_cpp(smollm2: LoadedModel, golden: Mapping[str, np.ndarray]) -> None:
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode((DATA / "prose.txt").read_text()) == golden["tokens"].tolist()


def steps(slot: int, ends: list[int], tokens: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Rows (slot, start, tokens) that compute a text up to each of the ends in turn."""
    return [(slot, start, tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def logits(loaded: LoadedModel, rows: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
    slots, starts, tokens = zip(*rows, strict=True)
    lengths = np.array([len(t) for t in tokens], np.int32)
    numbers = np.array(slots, np.int32), np.array(starts, np.int32), lengths
    return loaded.model.forward(Batch(*numbers, np.concatenate(tokens).astype(np.int32), lengths > 0))


def check_side_by_side(
    loaded: LoadedModel, schedules: list[list[tuple[int, int, np.ndarray]]], golden: Mapping[str, np.ndarray]
) -> None:
    """Run the schedules at once, one row of each per step, and compare the logits after every row."""
    for turn in range(max(map(len, schedules))):
        rows = [schedule[turn] for schedule in schedules if turn < len(schedule)]
        for row, (_, start, new) in zip(logits(loaded, rows), rows, strict=True):
            position = start + len(new) - 1
            assert np.abs(row[golden["sample"]] - golden["logits"][position]).max() <= TOLERANCE, position
            assert row.argmax() == golden["argmax"][position], position


def test_logits_in_chunks_of_any_size(smollm2: LoadedModel, golden: Mapping[str, np.ndarray]) -> None:
    tokens, n = golden["tokens"], len(golden["tokens"])
    even = steps(2, [*range(97, n, 97), n], tokens)
    odd = steps(1, [1, 2, 3, 10, 30, 31, 200, 201, 500, 501, n - 1, n], tokens)
    check_side_by_side(smollm2, [even, odd], golden)


def test_logits_token_by_token(smollm2: LoadedModel, golden: Mapping[str, np.ndarray]) -> None:
    """Each slot has a stretch of the text's beginning to itself, after a prefill of all that comes before."""
    tokens = golden["tokens"]
    borders = np.linspace(1, 256, SLOTS + 1).astype(int).tolist()
    stretches = [range(first, last + 1) for first, last in pairwise(borders)]
    check_side_by_side(smollm2, [steps(slot, [*ends], tokens) for slot, ends in enumerate(stretches)], golden)


def test_the_model_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    batcher = ContinuousBatcher(smollm2.model, 4)
    batcher.submit(tokenizer.encode("The capital of France is"), max_tokens=5)
    batcher.submit(tokenizer.encode_chat([{"role": "user", "content": "Say hello."}]), max_tokens=32)
    paris, hello = sorted(batcher.run(), key=lambda finished: finished.handle)
    assert b"Paris" in b"".join(map(tokenizer.token_bytes, paris.output))
    assert (hello.finish_reason, hello.stop_reason) == ("stop", 2)
