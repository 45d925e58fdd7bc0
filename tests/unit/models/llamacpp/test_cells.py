"""The account of llama.cpp's cells, against a memory that knows what every sequence holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.llamacpp.cells import CellContexts

N_CONTEXTS, MAX_CONTEXT, N_CELLS = 4, 8, 16
NUMBERS = st.integers(0, N_CONTEXTS - 1)
LENGTHS = st.integers(0, MAX_CONTEXT)


class PlainMemory:
    """Sequences as lists of cells; a cell is an object."""

    n_cells = N_CELLS

    def __init__(self) -> None:
        self.sequences: list[list[object]] = [[] for _ in range(N_CONTEXTS)]

    def remove(self, sequence: int, start: int) -> bool:
        del self.sequences[sequence][start:]
        return True

    def copy(self, source: int, target: int, length: int) -> None:
        assert not self.sequences[target]
        self.sequences[target] = self.sequences[source][:length]

    def compute(self, batch: Batch) -> None:
        for context, start, length in zip(batch.contexts, batch.starts, batch.lengths, strict=True):
            assert len(self.sequences[context]) == start
            self.sequences[context] += [object() for _ in range(length)]

    @property
    def n_free(self) -> int:
        return N_CELLS - len({id(cell) for sequence in self.sequences for cell in sequence})


def rows(*found: tuple[int, int, int]) -> Batch:
    """A batch of rows (context, start, length)."""
    contexts, starts, lengths = np.array(found, np.int32).T
    return Batch(contexts, starts, lengths, np.zeros(lengths.sum(), np.int32), np.ones(len(found), np.bool_))


class Account(RuleBasedStateMachine):
    """Whatever happens, the account and the memory agree."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = PlainMemory()
        self.contexts = CellContexts(self.memory, N_CONTEXTS, MAX_CONTEXT)

    @rule(chosen=st.dictionaries(NUMBERS, st.tuples(LENGTHS, LENGTHS), min_size=1), fails=st.booleans())
    def compute(self, chosen: dict[int, tuple[int, int]], fails: bool) -> None:
        batch = rows(*((number, *self.fitting(number, *lengths)) for number, lengths in chosen.items()))
        goes_on = (batch.starts == self.contexts.lengths[batch.contexts]).all()
        fits = self.contexts.shortage(batch.contexts, batch.starts + batch.lengths) <= 0
        try:
            self.contexts.begin(batch)
        except MemoryError:
            assert not (goes_on and fits)
            return
        assert fits or not goes_on
        self.memory.compute(batch)
        if fails:
            self.contexts.abandon(batch)
        else:
            self.contexts.end(batch)

    def fitting(self, number: int, start: int, length: int) -> tuple[int, int]:
        start = min(start, int(self.contexts.lengths[number]), MAX_CONTEXT - 1)
        return start, min(max(1, length), MAX_CONTEXT - start)

    @rule(number=NUMBERS, length=LENGTHS)
    def truncate(self, number: int, length: int) -> None:
        self.contexts.truncate(number, length)

    @rule(source=NUMBERS, empty=NUMBERS, length=LENGTHS)
    def share(self, source: int, empty: int, length: int) -> None:
        self.contexts.truncate(empty, 0)
        assert self.contexts.share(source, empty, length) == min(length, self.contexts.lengths[source])

    @invariant()
    def lengths_agree(self) -> None:
        assert self.contexts.lengths.tolist() == [len(sequence) for sequence in self.memory.sequences]

    @invariant()
    def free_cells_agree(self) -> None:
        nobody = np.zeros(0, np.int32)
        assert self.contexts.shortage(nobody, nobody) == -self.memory.n_free


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_cells_that_do_not_suffice_harm_nobody() -> None:
    contexts = CellContexts(PlainMemory(), N_CONTEXTS, MAX_CONTEXT)
    for number in (0, 1):
        contexts.begin(batch := rows((number, 0, MAX_CONTEXT)))
        contexts.end(batch)
    with pytest.raises(MemoryError, match="raise --kv-memory-mib"):
        contexts.begin(rows((2, 0, 1)))
    assert contexts.lengths.tolist() == [8, 8, 0, 0]
