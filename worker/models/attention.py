"""Causal attention of the rows of one pass over their contexts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.gguf_file import Float32

Index = NDArray[np.int64]


class _Context(NamedTuple):
    """What one row sees: views of all layers, exactly as long as the row."""

    keys: Float32  # [layers, kv_heads, head_dim, tokens]
    values: Float32  # [layers, kv_heads, tokens, head_dim]


class _Chunk(NamedTuple):
    """A row that brings several tokens."""

    columns: slice
    context: _Context
    mask: Float32  # [new tokens, tokens] -inf where a key lies after the query, else 0


class AttentionRows:
    """The rows of one pass, ready to attend layer by layer.

    ``keys`` and ``values`` are those of all contexts, [contexts, layers, kv_heads, tokens, head_dim].
    """

    def __init__(self, batch: Batch, positions: Index, keys: Float32, values: Float32) -> None:
        self._n_kv_heads, self._head_dim = keys.shape[2], keys.shape[4]
        self._contexts, self._positions = np.repeat(batch.contexts, batch.lengths), positions
        self._keys, self._values = keys, values
        ends = np.cumsum(batch.lengths)
        single = batch.lengths == 1
        self._decode_columns = ends[single] - 1
        self._decode = [self._context(row, batch) for row in np.flatnonzero(single).tolist()]
        self._longest = max((context.keys.shape[3] for context in self._decode), default=0)
        self._chunks = [self._chunk(row, int(ends[row]), batch) for row in np.flatnonzero(~single).tolist()]

    def store(self, layer: int, k: Float32, v: Float32) -> None:
        """Put the keys and values of the pass's tokens, [tokens, kv_heads * head_dim], into their contexts."""
        shape = (len(k), self._n_kv_heads, self._head_dim)
        self._keys[self._contexts, layer, :, self._positions] = k.reshape(shape)
        self._values[self._contexts, layer, :, self._positions] = v.reshape(shape)

    def attend(self, layer: int, q: Float32, out: Float32) -> None:
        """Mix the values each token sees into ``out``; both are [tokens, heads * head_dim], ``q`` is scaled."""
        q = q.reshape(len(q), self._n_kv_heads, -1, self._head_dim)
        out = out.reshape(q.shape)
        if self._decode:
            out[self._decode_columns] = self._attend_decode(layer, q[self._decode_columns])
        for chunk in self._chunks:
            out[chunk.columns] = _attend_chunk(layer, q[chunk.columns], chunk)

    def _attend_decode(self, layer: int, q: Float32) -> Float32:
        """Rows of one token: a product per row at its own length, one softmax for all."""
        scores = np.full((*q.shape[:3], self._longest), -np.inf, np.float32)
        seen = [row[:, :, : context.keys.shape[3]] for row, context in zip(scores, self._decode, strict=True)]
        for row, context, out in zip(q, self._decode, seen, strict=True):
            np.matmul(row, context.keys[layer], out=out)
        sums = _exponentiate(scores)
        mixed = np.empty_like(q)
        for weights, context, out in zip(seen, self._decode, mixed, strict=True):
            np.matmul(weights, context.values[layer], out=out)
        mixed /= sums
        return mixed

    def _context(self, row: int, batch: Batch) -> _Context:
        number, end = batch.contexts[row], batch.starts[row] + batch.lengths[row]
        return _Context(self._keys[number, :, :, :end].swapaxes(2, 3), self._values[number, :, :, :end])

    def _chunk(self, row: int, end: int, batch: Batch) -> _Chunk:
        columns = slice(end - int(batch.lengths[row]), end)
        positions = self._positions[columns]
        mask = np.where(np.arange(positions[-1] + 1) > positions[:, None], np.float32(-np.inf), np.float32(0))
        return _Chunk(columns, self._context(row, batch), mask)


def _attend_chunk(layer: int, q: Float32, chunk: _Chunk) -> Float32:
    n, n_kv_heads, group, head_dim = q.shape
    keys, values = chunk.context.keys[layer], chunk.context.values[layer]
    scores = q.transpose(1, 2, 0, 3).reshape(n_kv_heads, group * n, head_dim) @ keys
    scores.reshape(n_kv_heads, group, *chunk.mask.shape)[...] += chunk.mask
    sums = _exponentiate(scores)
    mixed = scores @ values
    mixed /= sums
    by_token: Float32 = mixed.reshape(n_kv_heads, group, n, head_dim).transpose(2, 0, 1, 3)
    return by_token


def _exponentiate(scores: Float32) -> Float32:
    """Softmax numerators in place along the last axis; returns their sums, which are cheaper to divide by later."""
    scores -= np.max(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Float32 = np.sum(scores, axis=-1, keepdims=True)
    return sums
