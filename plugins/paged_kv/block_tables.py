"""Block tables: which physical blocks hold the tokens of each sequence, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plugins.paged_kv.block_pool import BlockPool

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """One row per sequence slot, kept as one matrix [max_seqs, max_blocks_per_seq] int32, so that growing all decoding
    sequences by a token and listing their blocks for a step are each a few array operations."""

    def __init__(self, pool: BlockPool, max_seqs: int, max_blocks_per_seq: int, tokens_per_block: int) -> None:
        self.pool = pool
        self._tokens_per_block = tokens_per_block
        self._table = np.zeros((max_seqs, max_blocks_per_seq), dtype=np.int32)
        self._num_held = np.zeros(max_seqs, dtype=np.int64)

    def num_blocks_for(self, num_tokens: IntArray) -> IntArray:
        """Blocks that so many tokens fill, the last one perhaps in part; same shape."""
        return -(-num_tokens // self._tokens_per_block)

    def num_missing(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """New blocks [n] that each slot needs before it can hold ``num_tokens`` [n] tokens."""
        return np.maximum(self.num_blocks_for(num_tokens) - self._num_held[slots], 0)

    def grow(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make room for ``num_tokens`` [n] in distinct ``slots`` [n], all or none; False if too few blocks are free."""
        missing = self.num_missing(slots, num_tokens)
        total = int(missing.sum())
        if total == 0:
            return True
        blocks = self.pool.allocate(total)
        if blocks is None:
            return False
        rows = np.repeat(slots, missing)
        columns = np.repeat(self._num_held[slots], missing) + _ramps(missing)
        self._table[rows, columns] = blocks
        self._num_held[slots] += missing
        return True

    def release(self, slot: int) -> None:
        """Give the slot's blocks back to the pool."""
        self.pool.free(self.row(slot))
        self._num_held[slot] = 0

    def row(self, slot: int) -> npt.NDArray[np.int32]:
        """Blocks of one slot, int32 [num_blocks], a view."""
        return self._table[slot, : self._num_held[slot]]

    def gather(self, slots: IntArray, num_tokens: IntArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Blocks that hold the first ``num_tokens`` [n] of each slot [n]: (indices [sum of blocks], begins [n + 1])."""
        counts = self.num_blocks_for(num_tokens)
        begins = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=begins[1:])
        flat = np.repeat(slots * self._table.shape[1], counts) + _ramps(counts)
        return self._table.ravel()[flat], begins


def _ramps(lengths: IntArray) -> IntArray:
    """[3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - lengths, lengths)
