"""Which blocks of 16 tokens hold the keys and values of which context."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.contexts import Contexts
from tokenmill.worker.models.fast.layout import BLOCK_TOKENS


class BlockTables(Contexts):
    """The blocks of ``n_contexts`` contexts, out of a pool of ``n_blocks``.

    Contexts may share blocks, whole ones only, which nobody writes: a context that begins anew within a block that
    others hold as well gets another block for it, and ``copies`` says what has to be copied there.
    """

    def __init__(self, n_contexts: int, max_context: int, n_blocks: int) -> None:
        super().__init__(n_contexts, max_context)
        self.n_blocks = n_blocks
        self.tables = np.zeros((n_contexts, _blocks(max_context)), np.int32)  # block numbers; those held come first
        self._held = np.zeros(n_contexts, np.int64)  # blocks of a context
        self._holders = np.zeros(n_blocks, np.int32)  # contexts of a block
        self._free = list(range(n_blocks))[::-1]  # the last one goes first: low numbers are used again and again

    def begin(self, batch: Batch) -> list[tuple[int, int]]:
        """Make room for a batch; returns (from, to) of blocks to copy before it is computed.

        Raises ``ValueError`` for a row that cannot be computed, ``MemoryError`` if the blocks do not suffice.
        """
        starts, ends = batch.starts, batch.starts + batch.lengths
        self._rewind(batch)
        for row in np.flatnonzero(_blocks(starts) < self._held[batch.contexts]).tolist():
            self._release(int(batch.contexts[row]), int(_blocks(starts[row])))
        if self.shortage(batch.contexts, ends) > 0:
            raise MemoryError("no memory is left for keys and values; raise --kv-memory-mib")
        copies: list[tuple[int, int]] = []
        crowded = _blocks(ends) > self._held[batch.contexts]
        for row in np.flatnonzero(crowded | self._last_is_shared(batch.contexts)).tolist():
            context = int(batch.contexts[row])
            copies += self._own_last(context)
            self._grow(context, int(_blocks(ends[row])))
        return copies

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        growth = np.maximum(_blocks(ends) - self._held[contexts], 0)
        copied = self._last_is_shared(contexts) & (ends > self.lengths[contexts])
        return int(growth.sum() + copied.sum() - len(self._free)) * BLOCK_TOKENS

    def _trim(self, context: int) -> None:
        self._release(context, int(_blocks(self.lengths[context])))

    def _begin_alike(self, source: int, target: int, length: int) -> int:
        self._release(target, 0)
        n = length // BLOCK_TOKENS  # whole blocks only
        self.tables[target, :n] = self.tables[source, :n]
        self._holders[self.tables[target, :n]] += 1
        self._held[target] = n
        return n * BLOCK_TOKENS

    def _last_is_shared(self, contexts: Int32) -> NDArray[np.bool_]:
        """Whether the block that a context's next token goes into is half full, and others hold it."""
        lengths = self.lengths[contexts]
        last = self.tables[contexts, np.minimum(lengths // BLOCK_TOKENS, self.tables.shape[1] - 1)]
        shared: NDArray[np.bool_] = (lengths % BLOCK_TOKENS != 0) & (self._holders[last] > 1)
        return shared

    def _release(self, context: int, kept: int) -> None:
        """Give all but the first ``kept`` blocks back."""
        given = self.tables[context, kept : self._held[context]][::-1]
        self._holders[given] -= 1
        self._free += given[self._holders[given] == 0].tolist()
        self._held[context] = min(kept, self._held[context])

    def _own_last(self, context: int) -> list[tuple[int, int]]:
        """Replace the half full last block, where others hold it, by one of the context's own."""
        if not self._last_is_shared(np.array([context], np.int32))[0]:
            return []
        number = self.lengths[context] // BLOCK_TOKENS
        shared, own = int(self.tables[context, number]), self._take()
        self._holders[shared] -= 1
        self.tables[context, number] = own
        return [(shared, own)]

    def _grow(self, context: int, n: int) -> None:
        for number in range(int(self._held[context]), n):
            self.tables[context, number] = self._take()
            self._held[context] = number + 1

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block


def _blocks(lengths: NDArray[np.integer] | int) -> NDArray[np.int64]:
    """Blocks that so many tokens take."""
    return -(-np.asarray(lengths, np.int64) // BLOCK_TOKENS)
