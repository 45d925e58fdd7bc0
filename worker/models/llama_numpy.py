"""The NumPy backend: llama-family models in float32, with keys and values of many contexts."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.context_model import ContextModel
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_pass import Pass, rope_turns
from tokenmill.worker.models.llama_weights import LlamaConfig, LlamaWeights
from tokenmill.worker.models.strips import StripContexts
from tokenmill.worker.models.threads import Threads

_WIDE = 16  # tokens from which a thread is faster with rows of its own than with a share of every product
_UNEVEN = 1.4  # how much more than its share the busiest thread may have: dividing every product costs about as much


class NumpyLlamaModel(ContextModel[StripContexts]):
    """A llama-family model with ``n_contexts`` contexts of up to ``max_context`` tokens, computed by ``threads``.

    Threads divide a wide step by rows, each computing its own through all layers without waiting for the others, and
    a narrow one by the rows of every matrix: the time of a narrow step is that of reading the weights.
    """

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
        contexts = StripContexts(config, n_contexts=n_contexts, max_context=max_context, kv_memory_mib=kv_memory_mib)
        super().__init__(config.vocab_size, contexts, eos_token_ids)
        self._threads = Threads(threads)
        turns = rope_turns(weights, contexts.max_context)
        self._whole = Pass(config, weights, contexts, turns, self._threads)
        self._passes = [Pass(config, weights, contexts, turns, Threads(1)) for _ in range(threads)]

    def forward(self, batch: Batch) -> Float32:
        """Compute the batch; float32 logits ``[complete.sum(), vocab_size]`` for its complete rows."""
        self._check_tokens(batch)
        self._contexts.begin(batch)
        logits = np.empty((np.count_nonzero(batch.complete), self._vocab_size), np.float32)
        shares = even_shares(batch, self._threads.n)
        if len(shares) == 1:
            self._whole.run(batch, logits)
        else:
            answers = np.cumsum(batch.complete) - 1  # of each complete row, its place among the logits
            work = zip(self._passes, shares, strict=True)
            self._threads.run(
                [partial(one.run, batch.rows(rows), logits, answers[rows[batch.complete[rows]]]) for one, rows in work]
            )
        self._contexts.end(batch)
        return logits


def even_shares(batch: Batch, n: int) -> list[NDArray[np.intp]]:
    """The rows of the batch in ``n`` shares of about equally many tokens; one share where they do not divide so."""
    shares: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for row in np.argsort(-batch.lengths, kind="stable").tolist():  # the longest first, each to who has least
        least = loads.index(min(loads))
        shares[least].append(row)
        loads[least] += int(batch.lengths[row])
    if min(loads) < _WIDE or max(loads) > _UNEVEN * sum(loads) / n:
        shares = [list(range(len(batch)))]
    return [np.array(share, np.intp) for share in shares]
