"""Columns of a block rounded one after the other, the error of each added to those that follow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import Grid, stored
from quantize.native.feedback import native_feedback

Float32 = npt.NDArray[np.float32]

_LONG = 256  # rows of a block from which on a matrix library, which does not say its order of sums, is faster


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


def times_steps(within: Float32, values: npt.NDArray[np.uint8], zeros: Float32) -> Float32:
    """``within`` [n, n] times the steps, which are ``values`` [n, out] without ``zeros`` [out]: [n, out]."""
    if len(within) > _LONG:
        return np.asarray(within @ np.subtract(values, zeros, dtype=np.float32), np.float32)
    native = native_feedback()
    if native is not None:
        return native.times_steps(within, values, zeros)
    products = np.zeros(values.shape, np.float32)
    for j, row in enumerate(values):
        products += within[:, j, None] * np.subtract(row, zeros, dtype=np.float32)
    return products


def fit_scales(
    gradient: Float32,
    of_steps: Float32,
    weights: Float32,
    values: npt.NDArray[np.uint8],
    errors: Float32,
    grid: Grid,
    first: Float32,
    most: float,
) -> None:
    """The scales [1, out] of a ``grid`` of one group of the least output error, given ``values``. All else [n, out].

    ``gradient`` is H times the errors, ``of_steps`` H times the steps, which are ``values`` without the zeros. Both
    the gradient and the ``errors`` (of the decoded values to ``weights``) become those of the scales that are found,
    which are not further from ``first`` [out] than by the factor ``most``.
    """
    native, scales, zeros = native_feedback(), grid.scales[0], grid.zeros[0]
    if native is not None:
        is_half = grid.dtype == np.float16
        native.fit_scales(gradient, of_steps, weights, values, errors, scales, first, zeros, most, half=is_half)
        return
    steps = np.subtract(values, zeros, dtype=np.float32)
    slope, curvature = ((steps * each).sum(axis=0) for each in (gradient, of_steps))
    # Where all steps are zero any scale is as good.
    change = np.divide(slope, curvature, out=np.zeros_like(slope), where=curvature > 0)
    found = stored(np.clip(scales - change, first / np.float32(most), first * np.float32(most)), grid.dtype)
    gradient += (found - scales) * of_steps
    errors[:] = steps * found - weights
    scales[:] = found


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
