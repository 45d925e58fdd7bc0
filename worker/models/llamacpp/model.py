"""Models that llama.cpp computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.context_model import ContextModel
from tokenmill.worker.models.llamacpp.cells import CellContexts
from tokenmill.worker.models.llamacpp.library import llama
from tokenmill.worker.models.llamacpp.session import Session
from tokenmill.worker.models.llamacpp.weights import Weights
from tokenmill.worker.models.memory import affordable

_PARKED_CONTEXTS = 4  # few: attention looks at every cell in use, for every token, also at those of others
_PROBE_CELLS = 256


class LlamaCppModel(ContextModel[CellContexts]):
    """A model with contexts of up to ``max_context`` tokens for ``slots`` requests and a few parked, in llama.cpp.

    llama.cpp writes to all of its memory when it begins. So that is as much as the slots can fill, or the budget
    allows; the parked contexts have what the running ones leave. Raises ``ModelLoadError`` for more sequences than
    llama.cpp can tell apart, and for memory that cannot go back to an earlier token.
    """

    def __init__(self, weights: Weights, *, slots: int, max_context: int, kv_memory_mib: int, threads: int) -> None:
        if slots > (most := int(llama.llama_max_parallel_sequences())):
            raise ModelLoadError(f"llama.cpp computes {most} sequences at most; lower --slots")
        capacity = (kv_memory_mib << 20) // _bytes_per_token(weights, threads)
        max_context = affordable(min(max_context, weights.trained_context), capacity, kv_memory_mib)
        n_contexts = min(slots + _PARKED_CONTEXTS, most)
        n_cells = min(capacity, slots * max_context)
        self._session = Session(weights, n_cells=n_cells, n_sequences=n_contexts, threads=threads)
        contexts = CellContexts(self._session, n_contexts, max_context)
        super().__init__(weights.vocab_size, contexts, weights.end_token_ids())

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Compute the batch; float32 logits ``[complete.sum(), vocab_size]`` for its complete rows.

        Raises ``RuntimeError`` where llama.cpp fails; its contexts then hold what they held before ``batch.starts``.
        """
        self._check_tokens(batch)
        self._contexts.begin(batch)
        wanted = np.zeros(len(batch.tokens), np.bool_)
        wanted[np.cumsum(batch.lengths) - 1] = batch.complete
        try:
            contexts = np.repeat(batch.contexts, batch.lengths)
            logits = self._session.decode(batch.tokens, batch.positions(), contexts, wanted)
        except BaseException:
            self._contexts.abandon(batch)
            raise
        self._contexts.end(batch)
        return logits


def _bytes_per_token(weights: Weights, threads: int) -> int:
    """What keys and values of one token take, found by computing two: architectures differ too much to tell.

    Raises ``ModelLoadError`` if they cannot be computed, or the second cannot be taken back.
    """
    probe = Session(weights, n_cells=_PROBE_CELLS, n_sequences=1, threads=threads)
    zero, unwanted = np.zeros(1, np.int32), np.zeros(1, np.bool_)
    sizes = []
    for position in (0, 1):
        try:
            probe.decode(zero, zero + position, zero, unwanted)
        except RuntimeError as error:
            raise ModelLoadError(f"{weights.path}: {error}") from error
        sizes.append(probe.size(0))
    if not probe.remove(0, 1):
        raise ModelLoadError(
            f"{weights.path}: the memory of this architecture (recurrent or hybrid) cannot go back to an earlier "
            "token, as preemption and repeats need; use a model of pure attention"
        )
    return max(1, sizes[1] - sizes[0])
