"""The contexts of the NumPy backend: keys and values of numbered sequences, in memory that follows their length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_weights import LlamaConfig
from tokenmill.worker.models.memory import PAGE, LazyMemory, affordable


class Contexts:
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
        self.max_context = affordable(max_context, self._capacity * PAGE // self._row, kv_memory_mib)
        grain = math.lcm(PAGE, self._row) // self._row  # tokens that end with a page
        n_tokens = -(-self.max_context // grain) * grain
        self._strip_bytes = n_tokens * self._row
        self._context_bytes = n_strips * self._strip_bytes
        shape = (n_contexts, config.n_layers, 2, config.n_kv_heads, n_tokens, config.head_dim)
        self._memory = LazyMemory(shape)
        self.keys: Float32 = self._memory.array[:, :, 0]  # [contexts, layers, kv_heads, tokens, head_dim]
        self.values: Float32 = self._memory.array[:, :, 1]
        self.lengths = np.zeros(n_contexts, np.int64)
        self._held = np.zeros(n_contexts, np.int64)  # pages of a strip that have been written

    def begin(self, batch: Batch) -> None:
        """Before a batch is computed: should that fail half-way, what lies after its starts is not to be trusted."""
        contexts = batch.contexts
        if (gaps := batch.starts > self.lengths[contexts]).any():
            context, start = contexts[gaps][0], batch.starts[gaps][0]
            raise ValueError(f"context {context} holds {self.lengths[context]} tokens, but the row starts at {start}")
        ends = batch.starts + batch.lengths
        if (end := ends.max()) > self.max_context:
            raise ValueError(f"a row of {end} tokens exceeds the context of {self.max_context}")
        self.lengths[contexts] = batch.starts
        self._held[contexts] = np.maximum(self._held[contexts], self._pages(ends))

    def end(self, batch: Batch) -> None:
        """After a batch has been computed."""
        self.lengths[batch.contexts] = batch.starts + batch.lengths

    def truncate(self, context: int, length: int) -> None:
        """Forget all but the first ``length`` tokens, and give the pages of the others back."""
        self.lengths[context] = min(length, self.lengths[context])
        kept, held = int(self._pages(self.lengths[context])), int(self._held[context])
        first, last = context * self._context_bytes, (context + 1) * self._context_bytes
        if not kept:
            self._memory.release(first, last)
        elif kept < held:
            for strip in range(first, last, self._strip_bytes):
                self._memory.release(strip + kept * PAGE, strip + held * PAGE)
        self._held[context] = min(kept, held)

    def share(self, source: int, target: int, length: int) -> int:
        """Copy the first ``length`` tokens of ``source`` into the empty ``target``; returns how many it now has."""
        if self.lengths[target]:
            raise ValueError(f"context {target} is not empty: it holds {self.lengths[target]} tokens")
        length = min(length, int(self.lengths[source]))
        for kind in (self.keys, self.values):
            kind[target, :, :, :length] = kind[source, :, :, :length]
        self.lengths[target] = length
        self._held[target] = max(self._held[target], self._pages(length))
        return length

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        growth = np.maximum(self._pages(ends) - self._held[contexts], 0).sum()
        return math.ceil(int(self._held.sum() + growth - self._capacity) * PAGE / self._row)

    def _pages(self, lengths: NDArray[np.integer] | int) -> NDArray[np.int64]:
        """Pages of a strip that so many tokens take."""
        return -(-np.multiply(lengths, self._row, dtype=np.int64) // PAGE)
