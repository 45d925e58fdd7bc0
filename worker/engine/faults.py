"""Model calls that may fail: find the guilty rows, and tell a bad request from a sick model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model import Batch, Model
from .params import MAX_INT


class ModelSickError(RuntimeError):
    """The model fails on everything; no request is blamed, and all of them are still running or waiting."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model call gave: answers of some complete rows, failures of others."""

    rows: NDArray[np.int64]  # [n] the batch's rows that were answered
    values: NDArray[Any]  # [n] token ids, or [n, V] float32 logits
    best: NDArray[np.int32]  # [n] the token ids, or the most likely ones
    failed: dict[int, str] = field(default_factory=dict)  # row of the batch → why

    def only(self, keep: NDArray[np.bool_]) -> Answers:
        """The answers of some of the rows; logits are large, so nothing is copied when all are kept."""
        if keep.all():
            return self
        return Answers(self.rows[keep], self.values[keep], self.best[keep], self.failed)


def ask(model: Model, batch: Batch) -> Answers:
    """Call the model; where it raises or its answer does not fit, halve the batch until the bad rows stand alone."""
    try:
        values = _call(model, batch)
    except Exception as error:
        if len(batch) == 1:
            return _failure(model, error)
        half = len(batch) // 2
        first, second = (ask(model, batch.rows(rows)) for rows in np.split(np.arange(len(batch)), [half]))
        return Answers(
            np.concatenate([first.rows, second.rows + half]),
            np.concatenate([first.values, second.values]),
            np.concatenate([first.best, second.best]),
            first.failed | {row + half: why for row, why in second.failed.items()},
        )
    return _verify(model, np.flatnonzero(batch.complete), values)


def check_health(model: Model, context: int) -> None:
    """Compute one token in an emptied context; ModelSickError when the model fails even on that."""
    token = model.eos_token_ids[0] if model.eos_token_ids else 0
    one, zero = np.array([1], np.int32), np.array([0], np.int32)
    canary = Batch(np.array([context], np.int32), zero, one, np.array([token], np.int32), np.array([True]))
    try:
        model.truncate(context, 0)
        failed = ask(model, canary).failed
    except Exception as error:
        failed = {0: _describe(error)}
    if failed:
        raise ModelSickError(f"the model fails on every request, and on a single token: {failed[0]}")


def _call(model: Model, batch: Batch) -> NDArray[Any]:
    """The model's answers for the complete rows; ValueError when their number or kind is wrong."""
    n = int(batch.complete.sum())
    values = np.asarray(model.forward(batch))
    if n == 0:
        return _no_answers(model)
    kinds, shape = ("f", (n, model.vocab_size)) if model.gives_logits else ("iu", (n,))
    if values.shape != shape or values.dtype.kind not in kinds:
        raise ValueError(f"the model answered {values.dtype}{list(values.shape)} where {n} rows were asked")
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and caught as such
        return values.astype(np.float32, copy=False) if model.gives_logits else values


def _verify(model: Model, rows: NDArray[np.int64], values: NDArray[Any]) -> Answers:
    """Sort out rows whose logits hold NaN or infinity, or whose token id is not in the vocabulary."""
    if model.gives_logits:
        best = values.argmax(axis=1)  # NaN counts as the largest
        good = np.isfinite(values[np.arange(len(best)), best])
        why = "the model's logits are not finite"
    else:
        best = values
        good = (best >= 0) & (best < (MAX_INT if model.vocab_size is None else model.vocab_size))
        why = "the model answered a token id outside its vocabulary"
    if good.all():
        return Answers(rows, values, best.astype(np.int32))
    failed = dict.fromkeys(rows[~good].tolist(), why)
    return Answers(rows[good], values[good], best[good].astype(np.int32), failed)


def _failure(model: Model, error: Exception) -> Answers:
    values = _no_answers(model)
    return Answers(np.empty(0, np.int64), values, np.empty(0, np.int32), {0: _describe(error)})


def _no_answers(model: Model) -> NDArray[Any]:
    return np.empty((0, model.vocab_size or 0), np.float32) if model.gives_logits else np.empty(0, np.int32)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
