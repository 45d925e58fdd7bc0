"""What all backends with contexts have in common."""

from __future__ import annotations

from typing import Generic, TypeVar

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.contexts import Contexts

C = TypeVar("C", bound=Contexts)


class ContextModel(Generic[C]):
    """A model with contexts, but for ``forward``."""

    gives_logits = True

    def __init__(self, vocab_size: int, contexts: C, eos_token_ids: tuple[int, ...]) -> None:
        self.n_contexts = len(contexts.lengths)
        self.vocab_size: int | None = vocab_size
        self.max_context: int | None = contexts.max_context
        self.eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._contexts = contexts

    def truncate(self, context: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a context; 0 empties it."""
        self._contexts.truncate(context, length)

    def share(self, source: int, target: int, length: int) -> int:
        """Let the empty context ``target`` begin with the first ``length`` tokens of ``source``; returns how many."""
        return self._contexts.share(source, target, length)

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        return self._contexts.shortage(contexts, ends)

    def _check_tokens(self, batch: Batch) -> None:
        if batch.tokens.min() < 0 or batch.tokens.max() >= self._vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._vocab_size - 1}")
