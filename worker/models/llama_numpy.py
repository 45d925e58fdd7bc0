"""The NumPy backend: llama-family models in float32, with keys and values of many contexts."""

from __future__ import annotations

import numpy as np

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.attention import AttentionRows, token_positions
from tokenmill.worker.models.contexts import Contexts
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import Layer, LlamaConfig, LlamaWeights


class LlamaModel:
    """A llama-family model with ``n_contexts`` contexts of up to ``max_context`` tokens.

    Activations are feature-major, [features, tokens]: that is the orientation in which BLAS is fastest for the few
    dozen columns of a step. Prefill and decode rows share every matrix product; attention runs per row, over views
    of the cache that are exactly as long as the row, because batching it means padding every row to the longest.
    """

    gives_logits = True

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        eos_token_ids: tuple[int, ...],
        *,
        n_contexts: int,
        max_context: int,
        kv_memory_mib: int,
    ) -> None:
        max_context = min(max_context, config.context_length)
        self._contexts = Contexts(config, n_contexts=n_contexts, max_context=max_context, kv_memory_mib=kv_memory_mib)
        self.n_contexts = n_contexts
        self.vocab_size: int | None = config.vocab_size
        self.max_context: int | None = self._contexts.max_context
        self.eos_token_ids = eos_token_ids
        self._config, self._weights = config, weights
        angles = weights.rope_frequencies[:, None] * np.arange(self._contexts.max_context)
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._scratch = _Scratch()

    def truncate(self, context: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a context; 0 empties it."""
        self._contexts.truncate(context, length)

    def share(self, source: int, target: int, length: int) -> int:
        """Let the empty context ``target`` begin with the first ``length`` tokens of ``source``; returns how many."""
        return self._contexts.share(source, target, length)

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        return self._contexts.shortage(contexts, ends)

    def forward(self, batch: Batch) -> Float32:
        """Compute the batch; float32 logits ``[complete.sum(), vocab_size]`` for its complete rows."""
        if batch.tokens.min() < 0 or batch.tokens.max() >= self._config.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._config.vocab_size - 1}")
        self._contexts.begin(batch)
        positions = token_positions(batch)
        rows = AttentionRows(batch, positions, self._contexts.keys, self._contexts.values)
        hidden = np.ascontiguousarray(self._weights.embedding[batch.tokens].T)
        rotation = self._cos[:, positions], self._sin[:, positions]
        for i, layer in enumerate(self._weights.layers):
            self._attention(i, layer, hidden, rows, rotation)
            self._ffn(layer, hidden)
        self._contexts.end(batch)
        last = (np.cumsum(batch.lengths) - 1)[batch.complete]
        return self._logits(hidden[:, last])

    def _attention(
        self, i: int, layer: Layer, hidden: Float32, rows: AttentionRows, rotation: tuple[Float32, Float32]
    ) -> None:
        """Add one attention block to ``hidden`` [width, tokens]."""
        c, n = self._config, hidden.shape[1]
        qkv = self._scratch.matrix("qkv", len(layer.qkv), n)
        np.matmul(layer.qkv, self._norm(hidden, layer.attention_norm), out=qkv)
        _rotate(qkv[: c.q_width + c.kv_width].reshape(c.n_heads + c.n_kv_heads, c.head_dim, n), *rotation)
        by_token = np.ascontiguousarray(qkv.T)
        q, k, v = np.split(by_token, [c.q_width, c.q_width + c.kv_width], axis=1)
        rows.store(i, k, v)
        mixed = self._scratch.matrix("mixed", n, c.q_width)
        rows.attend(i, q, mixed)
        hidden += layer.attention_out @ mixed.T

    def _ffn(self, layer: Layer, hidden: Float32) -> None:
        """Add one gated feed-forward block to ``hidden`` [width, tokens]."""
        ffn, n = self._config.ffn_width, hidden.shape[1]
        gate_up = self._scratch.matrix("gate_up", 2 * ffn, n)
        np.matmul(layer.gate_up, self._norm(hidden, layer.ffn_norm), out=gate_up)
        gate, up = gate_up[:ffn], gate_up[ffn:]
        gated = self._scratch.matrix("gated", ffn, n)
        with np.errstate(over="ignore"):  # exp may reach infinity; the quotient is then the right 0
            np.exp(np.negative(gate, out=gated), out=gated)
        gated += 1
        np.divide(gate, gated, out=gated)
        gated *= up
        hidden += layer.down @ gated

    def _norm(self, hidden: Float32, weight: Float32) -> Float32:
        """RMS norm of every column."""
        scale = np.einsum("ij,ij->j", hidden, hidden)
        scale /= len(hidden)
        scale += np.float32(self._config.rms_eps)
        normed = self._scratch.matrix("normed", *hidden.shape)
        np.divide(hidden, np.sqrt(scale, out=scale), out=normed)
        normed *= weight
        return normed

    def _logits(self, hidden: Float32) -> Float32:
        return np.ascontiguousarray(self._norm(hidden, self._weights.output_norm).T) @ self._weights.head.T


def _rotate(heads: Float32, cos: Float32, sin: Float32) -> None:
    """RoPE in place on [heads, head_dim, tokens]: dims (0, 1), (2, 3), … turn by the angles [rotated / 2, tokens]."""
    even, odd = heads[:, 0 : 2 * len(cos) : 2], heads[:, 1 : 2 * len(cos) : 2]
    cross = even * sin
    even *= cos
    even -= odd * sin
    odd *= cos
    odd += cross


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
