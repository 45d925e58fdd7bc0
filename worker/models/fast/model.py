"""The fast backend's model: contexts, buffers, and one step after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.context_model import ContextModel
from tokenmill.worker.models.fast.blocks import BlockTables
from tokenmill.worker.models.fast.forward import OTHER_PHASES, PHASES_PER_LAYER, forward
from tokenmill.worker.models.fast.layout import BLOCK_TOKENS, MODEL
from tokenmill.worker.models.fast.packing import aligned
from tokenmill.worker.models.fast.step import StepBuffers
from tokenmill.worker.models.fast.team import Team
from tokenmill.worker.models.fast.weights import FastWeights
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import LlamaConfig
from tokenmill.worker.models.memory import LazyMemory, affordable


class FastLlamaModel(ContextModel[BlockTables]):
    """A llama-family model with ``n_contexts`` contexts of up to ``max_context`` tokens, computed by ``threads``.

    Keys and values lie in blocks of 16 tokens, which contexts share where they begin alike. A token's result is the
    same bits in every batch, chunk and number of threads.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: FastWeights,
        eos_token_ids: tuple[int, ...],
        *,
        n_contexts: int,
        max_context: int,
        kv_memory_mib: int,
        threads: int,
    ) -> None:
        block = 2 * 2 * BLOCK_TOKENS * config.n_layers * config.kv_width  # bytes: float16 keys and values
        n_blocks = (kv_memory_mib << 20) // block
        max_context = affordable(min(max_context, config.context_length), n_blocks * BLOCK_TOKENS, kv_memory_mib)
        n_blocks = min(n_blocks, n_contexts * math.ceil(max_context / BLOCK_TOKENS))
        super().__init__(config.vocab_size, BlockTables(n_contexts, max_context, n_blocks), eos_token_ids)
        self._pool = LazyMemory((config.n_layers, n_blocks, block // 2 // config.n_layers), np.float16, huge_pages=True)
        self._weights = weights
        self._rotation = rotation_table(weights.rope_frequencies, config.head_dim, max_context)
        self._model = _record(config, weights, self._rotation, self._pool.array)
        self._buffers = StepBuffers(config, max_context, threads)
        n_phases = PHASES_PER_LAYER * config.n_layers + OTHER_PHASES
        arrays = (self._model, weights.layers, self._buffers.record)
        self._team = Team(threads, n_phases, lambda team, thread: forward(team, thread, *arrays))
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile or load the kernels now, and not while a first request waits."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        self.forward(Batch(zero, zero, one, zero, one > 0))
        self.truncate(0, 0)

    def forward(self, batch: Batch) -> Float32:
        """Compute the batch; float32 logits ``[complete.sum(), vocab_size]``, valid until the next call."""
        self._check_tokens(batch)
        for source, target in self._contexts.begin(batch):
            self._pool.array[:, target] = self._pool.array[:, source]
        logits = self._buffers.prepare(batch, batch.positions(), self._contexts.tables)
        self._team.run()
        self._contexts.end(batch)
        return logits


def rotation_table(frequencies: NDArray[np.float64], head_dim: int, max_context: int) -> Float32:
    """Cosines and sines for every dimension of a head, [2, max_context, head_dim].

    Sines have the sign with which a dimension's partner is added to it; dimensions that are not turned have cosine 1.
    """
    table: Float32 = aligned((2, max_context, head_dim), np.float32)
    table[0] = 1
    angles = np.arange(max_context)[:, None] * frequencies
    n = 2 * len(frequencies)
    table[0, :, :n] = np.repeat(np.cos(angles), 2, axis=1)
    table[1, :, :n] = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(max_context, n)
    return table


def _record(config: LlamaConfig, weights: FastWeights, rotation: Float32, pool: NDArray[np.float16]) -> NDArray[Any]:
    record = np.zeros(1, MODEL)
    for name in ("width", "n_heads", "n_kv_heads", "head_dim", "ffn_width", "rms_eps"):
        record[name] = getattr(config, name)
    record["cos"], record["sin"] = (half.ctypes.data for half in rotation)
    record["output_norm"] = weights.output_norm
    record["pool"], record["n_blocks"] = pool.ctypes.data, pool.shape[1]
    record["embedding"], record["head"] = weights.embedding.record, weights.head.record
    return record
