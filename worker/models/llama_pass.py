"""One pass of some tokens through the layers of a llama-family model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.attention import AttentionRows
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import Layer, LlamaConfig, LlamaWeights
from tokenmill.worker.models.strips import StripContexts
from tokenmill.worker.models.threads import Threads


class Pass:
    """Computes rows with memory of its own, so that several of them can work side by side on one model.

    Activations are feature-major, [features, tokens]: that is the orientation in which BLAS is fastest for the few
    dozen columns of a step. Prefill and decode rows share every matrix product; attention runs per row, over views
    of the contexts that are exactly as long as the row, because batching it means padding every row to the longest.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        contexts: StripContexts,
        turns: NDArray[np.complex64],
        threads: Threads,
    ) -> None:
        self._config, self._weights, self._contexts, self._threads = config, weights, contexts, threads
        self._turns = turns
        self._scratch = _Scratch()

    def run(self, batch: Batch, logits: Float32, answers: NDArray[np.intp] | slice = slice(None)) -> None:
        """Compute the batch; write the logits of its complete rows to the rows ``answers`` of ``logits``."""
        positions = batch.positions()
        rows = AttentionRows(batch, positions, self._contexts.keys, self._contexts.values)
        hidden = np.ascontiguousarray(self._weights.embedding[batch.tokens].T)
        turns = self._turns[positions][:, None]
        for i, layer in enumerate(self._weights.layers):
            self._attention(i, layer, hidden, rows, turns)
            self._ffn(layer, hidden)
        last = (np.cumsum(batch.lengths) - 1)[batch.complete]
        if len(last):
            self._head(hidden[:, last], logits, answers)

    def _attention(
        self, i: int, layer: Layer, hidden: Float32, rows: AttentionRows, turns: NDArray[np.complex64]
    ) -> None:
        """Add one attention block to ``hidden`` [width, tokens]."""
        c, n = self._config, hidden.shape[1]
        qkv = self._scratch.matrix("qkv", c.q_width + 2 * c.kv_width, n)
        layer.qkv.times(self._norm(hidden), qkv, self._threads)
        by_token = self._scratch.matrix("by token", n, len(qkv))
        by_token[...] = qkv.T
        _rotate(by_token[:, : -c.kv_width].reshape(n, -1, c.head_dim), turns)
        q, k, v = np.split(by_token, [c.q_width, c.q_width + c.kv_width], axis=1)
        rows.store(i, k, v)
        mixed = self._scratch.matrix("mixed", n, c.q_width)
        rows.attend(i, q, mixed)
        change = self._scratch.matrix("change", *hidden.shape)
        layer.attention_out.times(mixed.T, change, self._threads)
        hidden += change

    def _ffn(self, layer: Layer, hidden: Float32) -> None:
        """Add one gated feed-forward block to ``hidden`` [width, tokens]."""
        ffn, n = self._config.ffn_width, hidden.shape[1]
        gate_up = self._scratch.matrix("gate_up", 2 * ffn, n)
        layer.gate_up.times(self._norm(hidden), gate_up, self._threads)
        gate, up = gate_up[:ffn], gate_up[ffn:]
        gated = self._scratch.matrix("gated", ffn, n)
        with np.errstate(over="ignore"):  # exp may reach infinity; the quotient is then the right 0
            np.exp(np.negative(gate, out=gated), out=gated)
        gated += 1
        np.divide(gate, gated, out=gated)
        gated *= up
        change = self._scratch.matrix("change", *hidden.shape)
        layer.down.times(gated, change, self._threads)
        hidden += change

    def _norm(self, hidden: Float32) -> Float32:
        """RMS norm of every column; the weights that follow it are part of the next matrix."""
        scale = np.einsum("ij,ij->j", hidden, hidden)
        scale /= len(hidden)
        scale += np.float32(self._config.rms_eps)
        normed = self._scratch.matrix("normed", *hidden.shape)
        np.divide(hidden, np.sqrt(scale, out=scale), out=normed)
        return normed

    def _head(self, hidden: Float32, logits: Float32, answers: NDArray[np.intp] | slice) -> None:
        normed = self._norm(hidden)
        normed *= self._weights.output_norm
        by_token = self._scratch.matrix("logits", self._config.vocab_size, hidden.shape[1])
        self._weights.head.times(normed, by_token, self._threads)
        logits[answers] = by_token.T


def rope_turns(weights: LlamaWeights, max_context: int) -> NDArray[np.complex64]:
    """How far each pair of dimensions turns at each position, [max_context, turned dims / 2]."""
    angles = np.arange(max_context)[:, None] * weights.rope_frequencies
    turns: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
    return turns


def _rotate(heads: Float32, turns: NDArray[np.complex64]) -> None:
    """RoPE in place on [tokens, heads, head_dim]: dims (0, 1), (2, 3), … are complex numbers that turn."""
    pairs = heads[:, :, : 2 * turns.shape[2]].view(np.complex64)
    pairs *= turns


class _Scratch:
    """Reused memory: fresh arrays of this size are mapped and zeroed by the system at every use."""

    def __init__(self) -> None:
        self._arrays: dict[str, Float32] = {}

    def matrix(self, name: str, height: int, width: int) -> Float32:
        """An uninitialised [height, width] matrix, valid until the same name is asked for again."""
        array = self._arrays.get(name)
        if array is None or len(array) < height * width:
            array = self._arrays[name] = np.empty(height * width, np.float32)
        return array[: height * width].reshape(height, width)
