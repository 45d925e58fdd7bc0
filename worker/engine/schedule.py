"""Which tokens the model computes in the next step."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .model import Batch
from .slots import Int64, SlotTable

StepLimit = int | Literal["auto"] | None
"""Tokens of a step at most; None: no limit; "auto": few enough that prefill does not hold up the decoding rows."""

_UNDISTURBING = 128  # tokens of a step in which nothing decodes: more compute hardly faster, and what arrives waits


def schedule(table: SlotTable, slots: Int64, limit: StepLimit) -> tuple[Int64, Int64]:
    """The next step's rows among ``slots``, and how many tokens each brings: every decode row, then prefill rows.

    Prefill shares what the limit leaves beside the decode rows; a row that gets nothing is left out.
    """
    pending = table.length[slots] - table.computed[slots]
    if not pending.size or pending.max() == 1:
        return slots, pending
    decode, prefill = slots[pending == 1], slots[pending > 1]
    prefill = prefill[np.argsort(table.serial[prefill])]
    lengths = table.length[prefill] - table.computed[prefill]
    if limit is not None:
        lengths = _share_out(lengths, _step_tokens(limit, len(decode), len(prefill)) - len(decode))
        prefill, lengths = prefill[lengths > 0], lengths[lengths > 0]
    return np.concatenate([decode, prefill]), np.concatenate([np.ones(len(decode), np.int64), lengths])


def make_batch(table: SlotTable, slots: Int64, lengths: Int64) -> Batch:
    """The batch in which each slot brings so many of its tokens that are not computed yet."""
    starts = table.computed[slots]
    return Batch(
        contexts=table.context[slots].astype(np.int32),
        starts=starts.astype(np.int32),
        lengths=lengths.astype(np.int32),
        tokens=table.tokens[np.repeat(slots, lengths), _positions(starts, lengths)],
        complete=starts + lengths == table.length[slots],
    )


def _step_tokens(limit: int | Literal["auto"], n_decode: int, n_prefill: int) -> int:
    """Tokens of a step in which so many rows decode and prefill.

    Where a step of n tokens takes a + b·n, two tokens a row make it at most twice as long as one of decode rows alone,
    whatever a and b are, and what late tokens of a long prompt take for their attention keeps it below 2.5 times; the
    8 more are for a, so that a prompt beside a single decode row gets on too.
    """
    if limit != "auto":
        return limit
    gentle = 8 + 2 * (n_decode + n_prefill)
    return gentle if n_decode else max(gentle, _UNDISTURBING)


def _share_out(wanted: Int64, budget: int) -> Int64:
    """Divide the budget among prefill rows, given oldest first: half to the oldest, the rest to the shortest first.

    Short prompts do not wait for the long one before them, which gets on by at least half of the budget all the same.
    """
    lengths = np.zeros_like(wanted)
    lengths[0] = min(wanted[0], (budget + 1) // 2)
    order = np.argsort(wanted, kind="stable")
    rest = (wanted - lengths)[order]
    lengths[order] += np.clip(budget - lengths[0] - (rest.cumsum() - rest), 0, rest)
    return lengths


def _positions(starts: Int64, lengths: Int64) -> Int64:
    """``starts[i], starts[i] + 1, …`` for ``lengths[i]`` positions, one row after another."""
    before = lengths.cumsum() - lengths
    positions: Int64 = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return positions
