"""Which contexts hold how many of the cells of llama.cpp's memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.contexts import Contexts


class Memory(Protocol):
    """What the contexts ask of llama.cpp."""

    n_cells: int

    def remove(self, sequence: int, start: int) -> bool:
        """Forget the tokens of a sequence from ``start`` on."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the empty sequence ``target`` begin with the first ``length`` tokens of ``source``, in the same cells."""
        ...


class CellContexts(Contexts):
    """``n_contexts`` sequences in llama.cpp's memory, and an account of its cells, which it keeps to itself.

    A cell holds one token, for all contexts that share it, and is free when the last of them forgets it. The account
    has numbers of its own for the cells.
    """

    def __init__(self, memory: Memory, n_contexts: int, max_context: int) -> None:
        super().__init__(n_contexts, max_context)
        self._memory = memory
        self._cells = np.zeros((n_contexts, max_context), np.int32)  # cell numbers; those held come first
        self._held = np.zeros(n_contexts, np.int64)  # cells of a context
        self._holders = np.zeros(memory.n_cells, np.int32)  # contexts of a cell
        self._n_free = memory.n_cells

    def begin(self, batch: Batch) -> None:
        """Make room for a batch.

        Raises ``ValueError`` for a row that cannot be computed, ``MemoryError`` if the cells do not suffice.
        """
        self._rewind(batch)
        for context in batch.contexts[self._held[batch.contexts] > batch.starts].tolist():
            self._trim(context)
        n = int(batch.lengths.sum())
        if n > self._n_free:
            raise MemoryError("no memory is left for keys and values; raise --kv-memory-mib")
        taken = np.flatnonzero(self._holders == 0)[:n]
        self._cells[np.repeat(batch.contexts, batch.lengths), batch.positions()] = taken
        self._holders[taken] = 1
        self._n_free -= n
        self._held[batch.contexts] = batch.starts + batch.lengths

    def abandon(self, batch: Batch) -> None:
        """After a batch has failed: forget what of it was computed."""
        for context in batch.contexts.tolist():
            self._trim(context)

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        return int(np.maximum(ends - self._held[contexts], 0).sum()) - self._n_free

    def _trim(self, context: int) -> None:
        length, held = int(self.lengths[context]), int(self._held[context])
        if length < held:
            self._memory.remove(context, length)
            given = self._cells[context, length:held]
            self._holders[given] -= 1
            self._n_free += int(np.count_nonzero(self._holders[given] == 0))
            self._held[context] = length

    def _begin_alike(self, source: int, target: int, length: int) -> int:
        self._memory.copy(source, target, length)
        shared = self._cells[target, :length] = self._cells[source, :length]
        self._holders[shared] += 1
        self._held[target] = length
        return length
