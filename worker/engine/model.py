"""The Model protocol: what the batcher asks of a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

ModelNext = Callable[[list[list[int]]], Sequence[int] | NDArray[Any]]
"""A black box: whole prefixes in, one next token id for each out."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step; prefill and decode differ only in how many tokens a row brings.

    Row ``i`` belongs to slot ``slots[i]`` and brings ``lengths[i]`` tokens that its slot has not computed yet, the
    first of them at position ``starts[i]``. The tokens of all rows lie one after another in ``tokens``.
    """

    slots: Int32  # [k] distinct slot numbers
    starts: Int32  # [k] tokens of the slot that are already computed
    lengths: Int32  # [k] ≥ 1
    tokens: Int32  # [lengths.sum()]
    complete: Bool  # [k] the row ends with the last token known: the model answers for it

    def __len__(self) -> int:
        return len(self.slots)


@runtime_checkable
class Model(Protocol):
    """A language model with ``capacity`` slots, each with a context of its own.

    Calling ``forward`` again with the same (slot, tokens, start), or with an earlier start, is allowed: tokens at and
    after ``start`` are then computed anew.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int | None  # tokens a slot can hold, prompt and output together; None: no limit
    gives_logits: bool  # False: forward answers token ids, and sampling parameters cannot be served

    def forward(self, batch: Batch) -> NDArray[Any]:
        """Compute the batch and answer for its complete rows, in order.

        Returns float logits ``[complete.sum(), vocab_size]`` when ``gives_logits``, else token ids
        ``[complete.sum()]``. The batcher may write into the returned array.
        """
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a slot; 0 empties it."""
        ...
