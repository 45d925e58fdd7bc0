"""The Model protocol: what the batcher asks of a language model, and how a plain function becomes one."""

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

    Row ``i`` goes on in context ``contexts[i]`` and brings ``lengths[i]`` tokens that are not computed there yet, the
    first of them at position ``starts[i]``. The tokens of all rows lie one after another in ``tokens``.
    """

    contexts: Int32  # [k] distinct context numbers
    starts: Int32  # [k] tokens of the context that are already computed
    lengths: Int32  # [k] ≥ 1
    tokens: Int32  # [lengths.sum()]
    complete: Bool  # [k] the row ends with the last token known: the model answers for it

    def __len__(self) -> int:
        return len(self.contexts)

    def positions(self) -> NDArray[np.int64]:
        """Position in its context of every token, [lengths.sum()]."""
        row_begins = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        positions: NDArray[np.int64] = np.arange(len(self.tokens)) + np.repeat(self.starts - row_begins, self.lengths)
        return positions

    def rows(self, numbers: NDArray[np.intp]) -> Batch:
        """The batch of these rows, in this order."""
        begins = np.cumsum(self.lengths) - self.lengths
        tokens = [self.tokens[begins[row] : begins[row] + self.lengths[row]] for row in numbers]
        return Batch(
            self.contexts[numbers],
            self.starts[numbers],
            self.lengths[numbers],
            np.concatenate(tokens),
            self.complete[numbers],
        )


@runtime_checkable
class Model(Protocol):
    """A language model with numbered contexts: the token sequences whose keys and values it holds.

    Calling ``forward`` again with the same (context, tokens, start), or with an earlier start, is allowed: tokens at
    and after ``start`` are then computed anew. So a new request takes over a context by starting at 0.
    """

    vocab_size: int | None  # None: unknown, any id ≥ 0 is taken; never None when gives_logits
    eos_token_ids: tuple[int, ...]
    max_context: int | None  # tokens a context can hold, prompt and output together; None: no limit
    gives_logits: bool  # False: forward answers token ids, and sampling parameters cannot be served

    def forward(self, batch: Batch) -> NDArray[Any]:
        """Compute the batch and answer for its complete rows, in order.

        Returns float logits ``[complete.sum(), vocab_size]`` when ``gives_logits``, else token ids
        ``[complete.sum()]``. The batcher reads the array before it calls again and does not write into it.
        """
        ...

    def truncate(self, context: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a context; 0 empties it."""
        ...


@runtime_checkable
class CachingModel(Model, Protocol):
    """A model with more contexts than slots, and a bound on the memory of all: the batcher decides what stays.

    Without these, context numbers are slot numbers.
    """

    n_contexts: int  # numbers are 0 … n_contexts - 1

    def share(self, source: int, target: int, length: int) -> int:
        """Let the empty context ``target`` begin with the first ``length`` tokens of ``source``.

        Returns how many tokens it has now, which may be fewer: the model shares in whole blocks.
        """
        ...

    def shortage(self, contexts: Int32, ends: Int32) -> int:
        """Tokens of memory lacking for these contexts to grow this long, beside all that is held; ≤ 0: they fit."""
        ...


class CallableModel:
    """A plain ``model_next(prefixes)`` behind the Model protocol: it keeps the prefix of every slot."""

    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    max_context: int | None = None
    gives_logits = False

    def __init__(self, model_next: ModelNext) -> None:
        self._model_next = model_next
        self._prefixes: dict[int, list[int]] = {}

    def forward(self, batch: Batch) -> NDArray[Any]:
        """Token ids ``[complete.sum()]``; the function gets copies, which are its own to change."""
        tokens = batch.tokens.tolist()
        complete: list[list[int]] = []
        first = 0
        for slot, start, length, ends in zip(
            batch.contexts.tolist(), batch.starts.tolist(), batch.lengths.tolist(), batch.complete.tolist(), strict=True
        ):
            prefix = self._prefixes.setdefault(slot, [])
            prefix[start:] = tokens[first : first + length]
            first += length
            if ends:
                complete.append(prefix.copy())
        if not complete:
            return np.empty(0, np.int32)
        return np.asarray(self._model_next(complete))

    @property
    def n_padded(self) -> int:
        """Cells that the function has computed for nothing, where it counts them as ``PaddedModel`` does."""
        return int(getattr(self._model_next, "n_padded", 0))

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a slot."""
        del self._prefixes.setdefault(slot, [])[length:]


def as_model(model: Model | ModelNext) -> Model:
    """The model itself, or a plain function wrapped; TypeError for anything else."""
    if isinstance(model, Model):
        return model
    if callable(model):
        return CallableModel(model)
    raise TypeError(f"a model is a function of prefixes or an object with the Model protocol, not {type(model)!r}")
