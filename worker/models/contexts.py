"""Contexts of a backend: numbered sequences, and the rules that all kinds of memory for them share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tokenmill.worker.engine.model import Batch, Int32


class Contexts(ABC):
    """``n_contexts`` sequences of at most ``max_context`` tokens; a subclass says where keys and values lie."""

    def __init__(self, n_contexts: int, max_context: int) -> None:
        self.max_context = max_context
        self.lengths = np.zeros(n_contexts, np.int64)  # tokens

    def end(self, batch: Batch) -> None:
        """After a batch has been computed."""
        self.lengths[batch.contexts] = batch.starts + batch.lengths

    def truncate(self, context: int, length: int) -> None:
        """Forget all but the first ``length`` tokens, and give the memory of the others back."""
        self.lengths[context] = min(length, self.lengths[context])
        self._trim(context)

    def share(self, source: int, target: int, length: int) -> int:
        """Let the empty ``target`` begin with the first ``length`` tokens of ``source``; returns how many it has."""
        if self.lengths[target]:
            raise ValueError(f"context {target} is not empty: it holds {self.lengths[target]} tokens")
        shared = self.lengths[target] = self._begin_alike(source, target, min(length, int(self.lengths[source])))
        return int(shared)

    @abstractmethod
    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""

    @abstractmethod
    def _trim(self, context: int) -> None:
        """Give back what a context does not need for its length."""

    @abstractmethod
    def _begin_alike(self, source: int, target: int, length: int) -> int:
        """Give an empty context these tokens, or as many as can be shared; returns how many."""

    def _rewind(self, batch: Batch) -> None:
        """Before a batch is computed: should that fail half-way, what lies after its starts is not to be trusted.

        Raises ``ValueError`` for a row that starts after its context's end, or grows too long.
        """
        if (gaps := batch.starts > self.lengths[batch.contexts]).any():
            context, start = batch.contexts[gaps][0], batch.starts[gaps][0]
            raise ValueError(f"context {context} holds {self.lengths[context]} tokens, but the row starts at {start}")
        if (end := (batch.starts + batch.lengths).max()) > self.max_context:
            raise ValueError(f"a row of {end} tokens exceeds the context of {self.max_context}")
        self.lengths[batch.contexts] = batch.starts
