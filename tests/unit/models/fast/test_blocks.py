"""The blocks of contexts: random operations against lists of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models.fast.blocks import BlockTables
from tokenmill.worker.models.fast.layout import BLOCK_TOKENS

CONTEXTS, MAX_CONTEXT, N_BLOCKS = 5, 80, 12


def batch(*rows: tuple[int, int, int]) -> Batch:
    """Rows of (context, start, length)."""
    contexts, starts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tokens = np.zeros(lengths.sum(), np.int32)
    return Batch(contexts, starts, lengths, tokens, np.ones(len(rows), bool))


class Contexts(RuleBasedStateMachine):
    """Contexts as lists of tokens, and beside them the blocks, which hold the same tokens wherever the tables point."""

    @initialize()
    def begin(self) -> None:
        self.blocks = BlockTables(CONTEXTS, MAX_CONTEXT, N_BLOCKS)
        self.memory = np.zeros((N_BLOCKS, BLOCK_TOKENS), np.int64)
        self.texts: list[list[int]] = [[] for _ in range(CONTEXTS)]
        self.next_token = 1

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A step: each row goes on at the end of its context or before, if there is room for all."""
        contexts = data.draw(st.lists(st.integers(0, CONTEXTS - 1), min_size=1, unique=True))
        starts = [data.draw(st.integers(0, len(self.texts[c]))) for c in contexts]
        lengths = [data.draw(st.integers(1, min(MAX_CONTEXT - start, 40))) for start in starts]
        for context, start in zip(contexts, starts, strict=True):
            self.truncate(context, start)
        ends = np.add(starts, lengths, dtype=np.int32)
        step = batch(*zip(contexts, starts, lengths, strict=True))
        if self.blocks.shortage(np.array(contexts, np.int32), ends) > 0:
            with pytest.raises(MemoryError, match="--kv-memory-mib"):
                self.blocks.begin(step)
            return
        for source, target in self.blocks.begin(step):
            self.memory[target] = self.memory[source]
        for context, start, length in zip(contexts, starts, lengths, strict=True):
            for position in range(start, start + length):
                block = self.blocks.tables[context, position // BLOCK_TOKENS]
                self.memory[block, position % BLOCK_TOKENS] = self.next_token
                self.texts[context].append(self.next_token)
                self.next_token += 1
        self.blocks.end(step)

    @rule(context=st.integers(0, CONTEXTS - 1), length=st.integers(0, MAX_CONTEXT))
    def truncate(self, context: int, length: int) -> None:
        self.blocks.truncate(context, length)
        del self.texts[context][length:]

    @precondition(lambda self: not all(self.texts))
    @rule(data=st.data(), source=st.integers(0, CONTEXTS - 1), length=st.integers(0, MAX_CONTEXT))
    def share(self, data: st.DataObject, source: int, length: int) -> None:
        target = data.draw(st.sampled_from([c for c in range(CONTEXTS) if not self.texts[c]]))
        shared = self.blocks.share(source, target, length)
        assert shared == min(length, len(self.texts[source])) // BLOCK_TOKENS * BLOCK_TOKENS
        self.texts[target] = self.texts[source][:shared]

    @invariant()
    def every_context_reads_its_own_tokens(self) -> None:
        for context, text in enumerate(self.texts):
            read = self.memory[self.blocks.tables[context]].reshape(-1)[: len(text)]
            assert read.tolist() == text
            assert self.blocks.lengths[context] == len(text)

    @invariant()
    def shortage_counts_what_is_not_held(self) -> None:
        held = {
            int(block)
            for context, text in enumerate(self.texts)
            for block in self.blocks.tables[context, : -(-len(text) // BLOCK_TOKENS)]
        }
        none = np.array([], np.int32)
        assert -self.blocks.shortage(none, none) == (N_BLOCKS - len(held)) * BLOCK_TOKENS


TestContexts = Contexts.TestCase
TestContexts.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_sharing_takes_no_memory() -> None:
    blocks = BlockTables(CONTEXTS, MAX_CONTEXT, n_blocks=5)
    blocks.begin(step := batch((0, 0, 80)))
    blocks.end(step)
    assert [blocks.share(0, target, 64) for target in (1, 2, 3)] == [64] * 3
    everyone, ends = np.arange(4, dtype=np.int32), np.full(4, 80, np.int32)
    assert blocks.shortage(everyone, ends) == 3 * BLOCK_TOKENS  # one more block for each but the first


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    blocks = BlockTables(CONTEXTS, MAX_CONTEXT, N_BLOCKS)
    blocks.begin(step := batch((0, 0, 40)))
    blocks.end(step)
    blocks.share(0, 1, 32)
    blocks.truncate(1, 20)
    assert blocks.shortage(np.array([1], np.int32), np.array([21], np.int32)) == -8 * BLOCK_TOKENS
    shared = int(blocks.tables[0, 1])
    [(source, target)] = blocks.begin(batch((1, 20, 1)))
    assert (source, target) == (shared, int(blocks.tables[1, 1]))
    assert target not in blocks.tables[0, :3]
    assert blocks.begin(batch((0, 20, 1))) == []  # the other has it for itself again
