"""The toy model depends on the whole prefix and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.engine import Batch, ContinuousBatcher
from tokenmill.worker.models.toy import EOS, ByteTokenizer, ToyModel

TOKENS = st.lists(st.integers(0, 256), min_size=1, max_size=12)


def forward(model: ToyModel, slot: int, start: int, tokens: list[int]) -> np.ndarray:
    numbers = (np.array([n], np.int32) for n in (slot, start, len(tokens)))
    return model.forward(Batch(*numbers, tokens=np.array(tokens, np.int32), complete=np.array([True])))[0]


@given(tokens=TOKENS, cut=st.integers(1, 11), slot=st.integers(0, 1))
def test_logits_do_not_depend_on_slot_or_chunks(tokens: list[int], cut: int, slot: int) -> None:
    model = ToyModel(slots=2, max_context=16)
    whole = forward(model, 0, 0, tokens)
    cut = min(cut, len(tokens))
    logits = forward(model, slot, 0, tokens[:cut])
    if cut < len(tokens):
        logits = forward(model, slot, cut, tokens[cut:])
    np.testing.assert_array_equal(logits, whole)


@given(one=TOKENS, other=TOKENS)
def test_another_prefix_gives_other_logits(one: list[int], other: list[int]) -> None:
    model = ToyModel(slots=1, max_context=16)
    assert (forward(model, 0, 0, one) == forward(model, 0, 0, other)).all() == (one == other)


def test_a_step_may_be_taken_back_but_none_left_out() -> None:
    model = ToyModel(slots=1, max_context=16)
    expected = forward(model, 0, 0, [1, 2, 3])
    forward(model, 0, 1, [9, 9, 9])
    model.truncate(0, 1)
    with pytest.raises(ValueError, match="after the end"):
        forward(model, 0, 2, [3])
    np.testing.assert_array_equal(forward(model, 0, 1, [2, 3]), expected)


def test_greedy_output_is_readable_and_ends_by_itself() -> None:
    batcher = ContinuousBatcher(ToyModel(slots=64, max_context=2048), 64)
    for i in range(200):
        batcher.submit([i], max_tokens=1000)
    finished = batcher.run()
    assert {f.finish_reason for f in finished} == {"stop"}
    assert {f.stop_reason for f in finished} == {EOS}
    assert 40 < np.mean([f.n_generated for f in finished]) < 90
    text = b"".join(ByteTokenizer().token_bytes(t) for f in finished for t in f.output).decode()
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")


@given(st.text())
def test_bytes_are_the_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(EOS) == b""


def test_a_chat_is_one_line_per_message() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert ByteTokenizer().encode_chat(messages) == list(b"user: hi\nassistant: ")
