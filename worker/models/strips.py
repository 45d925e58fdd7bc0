"""The contexts of the NumPy backend: keys and values in strips of memory that follow their length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.contexts import Contexts
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import LlamaConfig
from tokenmill.worker.models.memory import PAGE, LazyMemory, affordable


class StripContexts(Contexts):
    """Keys and values of ``n_contexts`` sequences of at most ``max_context`` tokens, within a budget of memory.

    A context has strips of addresses, long enough for ``max_context`` tokens: in every layer one for the keys and one
    for the values of each head. Only those pages of a strip that hold tokens take memory. Strips, and not blocks behind
    a table, because NumPy sees a strip as one view, and would have to gather blocks in every step; the price is that
    ``share`` copies. Raises ``ModelLoadError`` where the budget is too small for anything.
    """

    def __init__(self, config: LlamaConfig, *, n_contexts: int, max_context: int, kv_memory_mib: int) -> None:
        self._row = 4 * config.head_dim  # bytes of one token in a strip
        n_strips = 2 * config.n_layers * config.n_kv_heads
        self._capacity = (kv_memory_mib << 20) // (PAGE * n_strips)  # pages of a strip, over all contexts
        max_context = affordable(max_context, self._capacity * PAGE // self._row, kv_memory_mib)
        super().__init__(n_contexts, max_context)
        grain = math.lcm(PAGE, self._row) // self._row  # tokens that end with a page
        n_tokens = -(-max_context // grain) * grain
        self._strip_bytes = n_tokens * self._row
        self._context_bytes = n_strips * self._strip_bytes
        shape = (n_contexts, config.n_layers, 2, config.n_kv_heads, n_tokens, config.head_dim)
        self._memory = LazyMemory(shape)
        self.keys: Float32 = self._memory.array[:, :, 0]  # [contexts, layers, kv_heads, tokens, head_dim]
        self.values: Float32 = self._memory.array[:, :, 1]
        self._held = np.zeros(n_contexts, np.int64)  # pages of a strip that have been written

    def begin(self, batch: Batch) -> None:
        """Before a batch is computed; ``ValueError`` for a row that cannot be."""
        self._rewind(batch)
        pages = self._pages(batch.starts + batch.lengths)
        self._held[batch.contexts] = np.maximum(self._held[batch.contexts], pages)

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        growth = np.maximum(self._pages(ends) - self._held[contexts], 0).sum()
        return math.ceil(int(self._held.sum() + growth - self._capacity) * PAGE / self._row)

    def _trim(self, context: int) -> None:
        kept, held = int(self._pages(self.lengths[context])), int(self._held[context])
        first, last = context * self._context_bytes, (context + 1) * self._context_bytes
        if not kept:
            self._memory.release(first, last)
        elif kept < held:
            for strip in range(first, last, self._strip_bytes):
                self._memory.release(strip + kept * PAGE, strip + held * PAGE)
        self._held[context] = min(kept, held)

    def _begin_alike(self, source: int, target: int, length: int) -> int:
        for kind in (self.keys, self.values):
            kind[target, :, :, :length] = kind[source, :, :, :length]
        self._held[target] = max(self._held[target], self._pages(length))
        return length

    def _pages(self, lengths: NDArray[np.integer] | int) -> NDArray[np.int64]:
        """Pages of a strip that so many tokens take."""
        return -(-np.multiply(lengths, self._row, dtype=np.int64) // PAGE)
