"""The NumPy backend: llama-family models in float32, with keys and values of many contexts."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.llama_model import LlamaModel
from tokenmill.worker.models.llama_pass import Pass, rope_turns
from tokenmill.worker.models.llama_weights import LlamaConfig, LlamaWeights
from tokenmill.worker.models.strips import StripContexts
from tokenmill.worker.models.threads import Threads

_WIDE = 16  # tokens from which a thread is faster with rows of its own than with a share of every product


class NumpyLlamaModel(LlamaModel[StripContexts]):
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
        super().__init__(config, contexts, eos_token_ids)
        self._threads = Threads(threads)
        turns = rope_turns(weights, contexts.max_context)
        self._whole = Pass(config, weights, contexts, turns, self._threads)
        self._passes = [Pass(config, weights, contexts, turns, Threads(1)) for _ in range(threads)]

    def forward(self, batch: Batch) -> Float32:
        """Compute the batch; float32 logits ``[complete.sum(), vocab_size]`` for its complete rows."""
        self._check_tokens(batch)
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
