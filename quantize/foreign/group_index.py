"""g_idx: which group each input column belongs to, for weights that were rounded in another order (act_order)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.foreign.parts import Module, Part


def group_index(
    module: Module, g_idx: Part, group_size: int, groups: int, *, unset: bool = False
) -> npt.NDArray[np.int32] | None:
    """None when the groups are neighbouring columns in order. ``unset``: all -1 means the same.

    Raises CheckpointError for an index without a group.
    """
    stored = g_idx.load()
    low, high = int(stored.min()), int(stored.max())
    if unset and low == high == -1:
        return None
    if low < 0 or high >= groups:
        raise module.refused(f"has groups {low} .. {high} in g_idx, expected 0 .. {groups - 1}")
    index = stored.astype(np.int32)
    return None if (index == np.arange(len(index)) // group_size).all() else index
