"""Blocks are neither lost nor given to two sequences, whatever the order of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from plugins.paged_kv.block_pool import BlockPool
from plugins.paged_kv.block_tables import BlockTables

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.references = [0] * NUM_BLOCKS

    @rule(target=holdings, count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int):
        num_free = self.pool.num_free
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > num_free
            assert self.pool.num_free == num_free
            return multiple()
        assert len(blocks) == count
        for block in blocks.tolist():
            assert self.references[block] == 0, "a block was given out while someone holds it"
            self.references[block] = 1
        return blocks

    @rule(target=holdings, blocks=holdings)
    def share(self, blocks):
        self.pool.share(blocks)
        for block in blocks.tolist():
            self.references[block] += 1
        return blocks

    @rule(blocks=consumes(holdings))
    def free(self, blocks):
        self.pool.free(blocks)
        for block in blocks.tolist():
            self.references[block] -= 1

    @invariant()
    def counts_agree(self):
        assert self.pool.num_free == self.references.count(0)
        assert [self.pool.num_references(block) for block in range(NUM_BLOCKS)] == self.references


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_block_freed_twice_is_an_error_and_not_given_out_twice():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(ValueError, match="not allocated"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="not allocated"):
        pool.share(blocks)
    assert pool.num_free == 4


def test_sequences_grow_together_or_not_at_all():
    tables = BlockTables(BlockPool(5), max_seqs=3, max_blocks_per_seq=4, tokens_per_block=4)
    slots = np.array([0, 2])
    assert tables.num_missing(slots, np.array([5, 4])).tolist() == [2, 1]
    assert tables.grow(slots, np.array([5, 4]))
    assert not tables.grow(slots, np.array([9, 12]))
    assert [len(tables.row(slot)) for slot in range(3)] == [2, 0, 1]
    assert tables.grow(slots, np.array([8, 4])), "the blocks held have room for these"
    assert tables.pool.num_free == 2


def test_tables_list_each_sequence_in_order():
    tables = BlockTables(BlockPool(8), max_seqs=3, max_blocks_per_seq=4, tokens_per_block=4)
    tables.grow(np.array([1]), np.array([4]))
    tables.grow(np.array([0, 1]), np.array([12, 5]))
    indices, begins = tables.gather(np.array([1, 0]), np.array([5, 7]))
    assert begins.tolist() == [0, 2, 4]
    assert indices.tolist() == [*tables.row(1), *tables.row(0)[:2]]
    for slot in (0, 1):
        tables.release(slot)
    assert tables.pool.num_free == 8
