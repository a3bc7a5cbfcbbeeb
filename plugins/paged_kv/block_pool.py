"""Physical KV blocks and who holds them (PagedAttention, https://arxiv.org/abs/2309.06180, section 4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockPool:
    """``num_blocks`` physical blocks with reference counts. One thread owns it.

    A block leaves the free list with one reference; ``share`` adds one, ``free`` takes one, and the block returns to
    the free list when none is left. Every operation costs O(blocks named), whatever the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        # A stack, lowest number on top: blocks just freed are still warm in a CPU's cache and are given out first.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._references = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_blocks(self) -> int:
        return len(self._free)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> npt.NDArray[np.int32] | None:
        """Take ``count`` blocks, each with one reference, int32 [count]; None, and none taken, if too few are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._references[blocks] = 1
        return blocks

    def share(self, blocks: npt.NDArray[np.int32]) -> None:
        """Add a reference to each of these distinct blocks. Raises ValueError when one is free."""
        self._check_held(blocks)
        self._references[blocks] += 1

    def free(self, blocks: npt.NDArray[np.int32]) -> None:
        """Drop a reference to each of these distinct blocks. Raises ValueError when one is free already."""
        self._check_held(blocks)
        self._references[blocks] -= 1
        released = blocks[self._references[blocks] == 0]
        self._free[self._num_free : self._num_free + len(released)] = released[::-1]
        self._num_free += len(released)

    def num_references(self, block: int) -> int:
        return int(self._references[block])

    def _check_held(self, blocks: npt.NDArray[np.int32]) -> None:
        # A block freed twice would be given to two sequences, which then overwrite each other's keys without a sign.
        if not self._references[blocks].all():
            raise ValueError(f"blocks {blocks[self._references[blocks] == 0].tolist()} are not allocated")
