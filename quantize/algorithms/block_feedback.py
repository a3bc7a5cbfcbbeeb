"""Columns of a block rounded one after the other, the error of each added to those that follow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import Grid
from quantize.native.feedback import native_feedback

Float32 = npt.NDArray[np.float32]


def round_block(
    target: Float32,
    weights: Float32,
    feedback: Float32,
    grid: Grid,
    groups: npt.NDArray[np.int32],
    values: npt.NDArray[np.uint8],
    errors: Float32,
) -> None:
    """Values 0..15 and errors, both [n, out], of ``weights`` [n, out] that are rounded at ``target`` [n, out].

    From the last row to the first: row k adds its error times ``feedback[k, j]`` ([n, n]) to the target of each row
    j < k, product and sum rounded one by one. ``groups`` [n]: the row of the ``grid`` that each has. ``target``, which
    carries the feedback of other blocks, is used up. Rows of all arrays are contiguous.
    """
    native = native_feedback()
    if native is not None:
        native.round_block(target, weights, feedback, grid.scales, grid.zeros, groups, values, errors)
        return
    for k in reversed(range(len(weights))):
        scales, zeros = grid.scales[groups[k]], grid.zeros[groups[k]]
        rounded = np.clip(np.rint(target[k] / scales) + zeros, 0, 15)
        values[k] = rounded
        errors[k] = weights[k] - (rounded - zeros) * scales
        target[:k] += feedback[k, :k, None] * errors[k]


def descend_block(
    gradient: Float32,
    errors: Float32,
    weights: Float32,
    within: Float32,
    grid: Grid,
    groups: npt.NDArray[np.int32],
    values: npt.NDArray[np.uint8],
) -> None:
    """One step of coordinate descent for each row of a block, the first row first. All [n, out] but ``within`` [n, n].

    ``gradient`` is H times the errors, of these rows, and is used up; ``within`` is the block of H. ``values`` and
    ``errors`` (of the decoded values to ``weights``) are replaced, and what a row moved by is added, times
    ``within[j, k]``, to the gradient of each row j > k.
    """
    native = native_feedback()
    if native is not None:
        native.descend_block(gradient, errors, weights, within, grid.scales, grid.zeros, groups, values)
        return
    for k in range(len(weights)):
        scales, zeros = grid.scales[groups[k]], grid.zeros[groups[k]]
        wanted = (weights[k] + errors[k] - gradient[k] / within[k, k]) / scales
        rounded = np.clip(np.rint(wanted) + zeros, 0, 15)
        error = (rounded - zeros) * scales - weights[k]
        gradient[k + 1 :] += within[k + 1 :, k, None] * (error - errors[k])
        values[k], errors[k] = rounded, error
