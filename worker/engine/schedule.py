"""Which tokens the model computes in the next step."""

from __future__ import annotations

import numpy as np

from .model import Batch
from .slots import Int64, SlotTable


def next_batch(table: SlotTable, max_step_tokens: int | None) -> Batch:
    """The next step's rows: every decode row, then prefill rows, oldest admission first.

    Prefill shares what ``max_step_tokens`` leaves beside the decode rows; a row that gets nothing is left out.
    """
    slots = table.active()
    pending = table.length[slots] - table.computed[slots]
    lengths = pending
    if pending.size and pending.max() > 1:
        decode, prefill = slots[pending == 1], slots[pending > 1]
        slots = np.concatenate([decode, prefill[np.argsort(table.serial[prefill])]])
        pending = table.length[slots] - table.computed[slots]
        lengths = pending
        if max_step_tokens is not None:
            lengths = np.clip(max_step_tokens - (pending.cumsum() - pending), 0, pending)
            slots, pending, lengths = slots[lengths > 0], pending[lengths > 0], lengths[lengths > 0]
    starts = table.computed[slots]
    return Batch(
        contexts=slots.astype(np.int32),
        starts=starts.astype(np.int32),
        lengths=lengths.astype(np.int32),
        tokens=table.context[np.repeat(slots, lengths), _positions(starts, lengths)],
        complete=lengths == pending,
    )


def _positions(starts: Int64, lengths: Int64) -> Int64:
    """``starts[i], starts[i] + 1, …`` for ``lengths[i]`` positions, one row after another."""
    before = lengths.cumsum() - lengths
    positions: Int64 = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return positions
