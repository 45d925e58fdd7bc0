"""The memory of one step, and how a batch is laid out in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.fast.attention import QUERY
from tokenmill.worker.models.fast.layout import PANEL, STEP, activation_bytes, padded
from tokenmill.worker.models.fast.packing import aligned
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import LlamaConfig

CHUNK = 8
"""Tokens of a prompt that are one task of attention; they read keys and values together where registers allow."""


class StepBuffers:
    """Rows for the tokens of a step, which grow with the largest step, and the record that points to them."""

    def __init__(self, config: LlamaConfig, max_context: int, threads: int) -> None:
        c = config
        self.record: NDArray[Any] = np.zeros(1, STEP)
        self._vocab_size = c.vocab_size
        self._widths = {
            "hidden": padded(c.width, PANEL) * 4,
            "projected": padded(max(c.q_width + 2 * c.kv_width, 2 * c.ffn_width), PANEL) * 4,
            "activations": activation_bytes(max(c.width, c.q_width, c.ffn_width)),
            "logits": padded(c.vocab_size, PANEL) * 4,
        }
        self._rows: dict[str, NDArray[np.uint8]] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        score_stride = padded(4 * padded(max_context, 16), 64) + 64
        self._scratch = aligned((threads, padded(4 * QUERY + 4 * score_stride, 64)), np.uint8)
        self._set(score_stride=score_stride, scratch=self._scratch.ctypes.data, scratch_bytes=self._scratch.shape[1])

    def prepare(self, batch: Batch, positions: NDArray[np.int64], tables: NDArray[np.int32]) -> Float32:
        """Describe a batch to the kernels; returns the array [complete.sum(), vocab_size] that they will fill."""
        n_tokens, n_last = len(batch.tokens), int(batch.complete.sum())
        for name in ("hidden", "projected", "activations"):
            self._make_room(name, n_tokens)
        self._make_room("logits", n_last)
        starts, lengths, chunk_rows = _chunks(batch)
        addresses = tables.ctypes.data + tables.strides[0] * batch.contexts.astype(np.int64)
        last = (np.cumsum(batch.lengths) - 1)[batch.complete]
        self._point(np.int32, ids=batch.tokens, positions=positions, last=last)
        self._point(np.int32, chunk_starts=starts, chunk_lengths=lengths)
        token_tables = np.repeat(addresses, batch.lengths)
        self._point(np.int64, token_tables=token_tables, chunk_tables=addresses[chunk_rows])
        prompt_tokens = np.flatnonzero(np.repeat(batch.lengths > 1, batch.lengths))
        self._point(np.int32, prompt_tokens=prompt_tokens, chunk_is_row=batch.lengths[chunk_rows] == 1)
        self._set(n_tokens=n_tokens, n_prompt_tokens=len(prompt_tokens), n_chunks=len(starts), n_last=n_last)
        floats: Float32 = self._rows["logits"].view(np.float32)
        return floats[:n_last, : self._vocab_size]

    def _make_room(self, name: str, n: int) -> None:
        rows = self._rows.get(name)
        if rows is None or len(rows) < n:
            rows = self._rows[name] = aligned((padded(max(n, 1), 16), self._widths[name]), np.uint8)
            self._set(**{name: rows.ctypes.data, f"{name}_stride": rows.shape[1]})

    def _point(self, dtype: DTypeLike, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            kept = self._arrays[name] = np.ascontiguousarray(array, dtype)
            self._set(**{name: kept.ctypes.data})

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self.record[name] = value


def _chunks(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut the rows into chunks: first token, number of tokens, and row of each."""
    counts = -(-batch.lengths // CHUNK)
    rows = np.repeat(np.arange(len(batch)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a chunk within its row
    starts = (np.cumsum(batch.lengths) - batch.lengths)[rows] + CHUNK * number
    lengths = np.minimum(batch.lengths[rows] - CHUNK * number, CHUNK)
    return starts, lengths, rows
