"""The NumPy backend: llama-family models in float32, with keys and values of many contexts."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from tokenmill.worker.engine.model import Batch, Int32
from tokenmill.worker.models.contexts import Contexts
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_pass import Pass
from tokenmill.worker.models.llama_weights import LlamaConfig, LlamaWeights
from tokenmill.worker.models.threads import Threads

_WIDE = 16  # tokens from which a thread is faster with rows of its own than with a share of every product


class LlamaModel:
    """A llama-family model with ``n_contexts`` contexts of up to ``max_context`` tokens, computed by ``threads``.

    Threads divide a wide step by rows, each computing its own through all layers without waiting for the others, and
    a narrow one by the rows of every matrix: the time of a narrow step is that of reading the weights.
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
        threads: int,
    ) -> None:
        max_context = min(max_context, config.context_length)
        self._contexts = Contexts(config, n_contexts=n_contexts, max_context=max_context, kv_memory_mib=kv_memory_mib)
        self.n_contexts = n_contexts
        self.vocab_size: int | None = config.vocab_size
        self.max_context: int | None = self._contexts.max_context
        self.eos_token_ids = eos_token_ids
        self._vocab_size = config.vocab_size
        self._threads = Threads(threads)
        self._whole = Pass(config, weights, self._contexts, self._threads)
        self._passes = [Pass(config, weights, self._contexts, Threads(1)) for _ in range(threads)]

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
        if batch.tokens.min() < 0 or batch.tokens.max() >= self._vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._vocab_size - 1}")
        self._contexts.begin(batch)
        logits = np.empty((np.count_nonzero(batch.complete), self._vocab_size), np.float32)
        parts = _parts(batch, self._threads.n)
        if len(parts) == 1:
            self._whole.run(batch, logits)
        else:
            answers = np.split(logits, np.cumsum([np.count_nonzero(part.complete) for part in parts])[:-1])
            work = zip(self._passes, parts, answers, strict=True)
            self._threads.run([partial(one.run, part, answer) for one, part, answer in work])
        self._contexts.end(batch)
        return logits


def _parts(batch: Batch, n: int) -> list[Batch]:
    """The batch in ``n`` parts of about equally many tokens, or whole where its rows do not divide so."""
    ends = np.cumsum(batch.lengths)
    share = ends[-1] / n
    cuts = [int(np.abs(ends - share * i).argmin()) + 1 for i in range(1, n)]
    borders = [0, *cuts, len(batch)]
    loads = np.diff(np.concatenate([[0], ends])[borders])
    if n == 1 or loads.min() < _WIDE or loads.max() > 1.4 * share:
        return [batch]
    return [batch.rows(first, last) for first, last in pairwise(borders)]
