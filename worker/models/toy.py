"""A toy model and tokenizer for tests: instant, deterministic, and sensitive to every token of the prefix."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch

VOCAB_SIZE = 257  # the bytes, and EOS
EOS = 256
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class ToyModel:
    """Logits are a hash of the slot's whole prefix, so a mixed-up row or a wrong resume changes every later token.

    Greedy output is lower-case letters and spaces, and ends with EOS after 60 tokens on average.
    """

    vocab_size: int | None = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)
    gives_logits = True

    def __init__(self, *, slots: int, max_context: int, delay_ms: float = 0.0) -> None:
        self.max_context: int | None = max_context
        self._delay_s = delay_ms / 1000
        self._hashes = np.zeros((slots, max_context + 1), np.uint64)  # of the first n tokens; those of none are 0
        self._lengths = np.zeros(slots, np.int64)
        self._salts = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * _MULTIPLIER
        self._bias = np.full(VOCAB_SIZE, -20, np.float32)
        self._bias[_LETTERS] = 0
        self._bias[EOS] = -0.2

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a slot; 0 empties it."""
        self._lengths[slot] = min(length, self._lengths[slot])

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Compute the batch; logits ``[complete.sum(), 257]`` for its complete rows."""
        if (batch.starts > self._lengths[batch.contexts]).any():
            raise ValueError("a row starts after the end of what its slot holds")
        if self._delay_s:
            time.sleep(self._delay_s)
        begins = np.cumsum(batch.lengths) - batch.lengths
        for i in range(batch.lengths.max()):  # the i-th token of every row that has one
            rows = batch.lengths > i
            slots, positions = batch.contexts[rows], batch.starts[rows] + i
            tokens = batch.tokens[begins[rows] + i].astype(np.uint64)
            self._hashes[slots, positions + 1] = _mix(self._hashes[slots, positions] + tokens + np.uint64(1))
        ends = batch.starts + batch.lengths
        self._lengths[batch.contexts] = ends
        return self._logits(self._hashes[batch.contexts, ends][batch.complete])

    def _logits(self, hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Uniform noise in [0, 8) for every token, plus its bias."""
        noise = _mix(hashes[:, None] ^ self._salts) >> np.uint64(40)
        return noise.astype(np.float32) * np.float32(8 / 2**24) + self._bias


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of splitmix64: every bit of the input moves half the bits of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ByteTokenizer:
    """One token per UTF-8 byte."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """One line per message, and the start of the answer."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The bytes of the rendered conversation."""
        return self.encode(self.render_chat(messages))

    def token_bytes(self, token_id: int) -> bytes:
        """The byte; EOS adds nothing."""
        return b"" if token_id == EOS else bytes([token_id])
