"""Contexts of the NumPy backend: shared beginnings, a budget, and memory that follows what they hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models import load_model
from tokenmill.worker.models.llama_weights import LlamaConfig
from tokenmill.worker.models.memory import PAGE, LazyMemory
from tokenmill.worker.models.strips import StripContexts

MIB = 1 << 20


def config(n_layers: int = 2, head_dim: int = 64) -> LlamaConfig:
    return LlamaConfig(n_layers, 64, 2, 2, head_dim, 48, 100, 4096, 1e-5)


def contexts(n: int = 4, *, max_context: int = 256, kv_memory_mib: int = 64, head_dim: int = 64) -> StripContexts:
    return StripContexts(config(head_dim=head_dim), n_contexts=n, max_context=max_context, kv_memory_mib=kv_memory_mib)


def compute(subject: StripContexts, context: int, start: int, end: int) -> None:
    """Pretend to compute the tokens from ``start`` to ``end``: their keys and values are their positions."""
    one = np.array([context], np.int32)
    length = np.array([end - start], np.int32)
    batch = Batch(one, np.array([start], np.int32), length, np.zeros(end - start, np.int32), np.array([True]))
    subject.begin(batch)
    for kind in (subject.keys, subject.values):
        kind[context, :, :, start:end] = np.arange(start, end)[:, None]
    subject.end(batch)


def lacking(subject: StripContexts, **ends: int) -> int:
    """Shortage for contexts to grow to the given ends, named ``c0``, ``c1``, …"""
    numbers = np.array([int(name[1:]) for name in ends], np.int32)
    return subject.shortage(numbers, np.array([*ends.values()], np.int32))


def test_a_shared_beginning_is_a_copy() -> None:
    subject = contexts()
    compute(subject, 0, 0, 100)
    assert subject.share(0, 2, 70) == 70
    compute(subject, 0, 0, 5)
    compute(subject, 2, 70, 80)
    np.testing.assert_array_equal(subject.keys[2, 1, 1, :80, 0], np.arange(80))
    np.testing.assert_array_equal(subject.values[2, 0, 0, :80, 63], np.arange(80))
    assert subject.lengths.tolist() == [5, 0, 80, 0]


def test_no_more_can_be_shared_than_is_held_and_only_with_an_empty_context() -> None:
    subject = contexts()
    compute(subject, 1, 0, 10)
    assert subject.share(1, 3, 99) == 10
    with pytest.raises(ValueError, match="context 3 is not empty: it holds 10 tokens"):
        subject.share(1, 3, 5)


def test_shortage_counts_whole_pages_of_all_contexts() -> None:
    capacity = 64 * MIB // (2 * 2 * 2 * 64 * 4)  # layers, keys and values, heads, dims, bytes
    subject = contexts()
    assert lacking(subject) == -capacity
    assert lacking(subject, c0=1) == 16 - capacity  # a page holds 16 tokens of a head
    assert lacking(subject, c0=17, c1=16) == 48 - capacity
    compute(subject, 0, 0, 20)
    assert lacking(subject) == lacking(subject, c0=32) == 32 - capacity
    assert lacking(subject, c1=16, c0=33) == 64 - capacity
    subject.truncate(0, 16)
    assert lacking(subject) == 16 - capacity
    assert lacking(subject, c0=17) == 32 - capacity


def test_a_full_budget_is_told_in_tokens() -> None:
    subject = contexts(64, max_context=1024, kv_memory_mib=8)  # 4096 tokens
    for context in range(4):
        compute(subject, context, 0, 1024)
    assert lacking(subject) == 0
    assert lacking(subject, c9=100) == 112
    subject.truncate(3, 0)
    assert lacking(subject, c9=100) == 112 - 1024


def test_what_a_takeover_from_the_start_leaves_behind_stays_counted() -> None:
    subject = contexts()
    empty = lacking(subject)
    compute(subject, 0, 0, 200)
    compute(subject, 0, 0, 3)
    assert lacking(subject, c0=200) == empty + 208
    subject.truncate(0, 3)
    assert lacking(subject) == empty + 16


@settings(max_examples=30, deadline=None)
@given(head_dim=st.sampled_from([8, 64, 80, 128]), data=st.data())
def test_released_pages_are_never_a_neighbours(head_dim: int, data: st.DataObject) -> None:
    subject = contexts(3, max_context=90, head_dim=head_dim)
    lengths = [0, 0, 0]
    for _ in range(8):
        context = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            end = data.draw(st.integers(lengths[context] + 1, 90)) if lengths[context] < 90 else 90
            compute(subject, context, min(lengths[context], end - 1), end)
            lengths[context] = end
        else:
            lengths[context] = data.draw(st.integers(0, lengths[context]))
            subject.truncate(context, lengths[context])
        for i, n in enumerate(lengths):
            for kind in (subject.keys, subject.values):
                assert (kind[i, :, :, :n] == np.arange(n)[:, None]).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_follows_the_tokens_held() -> None:
    subject = contexts(64, max_context=2048)  # 256 MiB of addresses
    before = resident()
    for context in range(8):
        compute(subject, context, 0, 2048)
    full = resident() - before
    assert 31 * MIB < full < 34 * MIB
    for context in range(8):
        subject.truncate(context, 256)
    assert resident() - before < full / 4
    for context in range(8):
        subject.truncate(context, 0)
    assert resident() - before < MIB


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_a_budget_too_small_for_one_request_shortens_contexts_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    subject = contexts(max_context=4096, kv_memory_mib=1)
    assert subject.max_context == 512
    compute(subject, 0, 0, 512)
    assert lacking(subject) == 0
    assert "contexts are 512 tokens long instead of 4096" in caplog.text
    assert "--kv-memory-mib" in caplog.text


def test_a_budget_for_nothing_is_refused() -> None:
    big = LlamaConfig(80, 8192, 64, 8, 128, 28672, 128_000, 8192, 1e-5)
    with pytest.raises(ModelLoadError, match="1 MiB cannot hold the keys and values of one token"):
        StripContexts(big, n_contexts=1, max_context=100, kv_memory_mib=1)


def test_addresses_that_the_system_refuses_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", no_memory)
    with pytest.raises(ModelLoadError, match=r"the system refuses 2\.0 GiB of addresses .* lower --slots"):
        LazyMemory((512, 1 << 20))


def test_a_model_takes_its_limits_from_the_spec_and_the_budget(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    assert load_model(f"gguf:{path}", slots=3).model.n_contexts == 67  # type: ignore[attr-defined]
    assert load_model(f"gguf:{path}", slots=1, max_context=16).model.max_context == 16
