"""GPTQ (arXiv 2210.17323): column by column, what rounding one column did to the outputs is made good in the next.

Written as LDLQ (QuIP, arXiv 2307.13304, which proves it equal): with H = (U + I) D (U + I)' and U strictly upper
triangular, column k is rounded at w_k + sum over j < k of (w_j - q_j) U[j, k]. One Cholesky factor and no inverse.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import Grid, range_grid
from quantize.algorithms.scale_search import search_grid
from quantize.recipe import Int4Settings

Float32 = npt.NDArray[np.float32]

_BLOCK = 128  # columns whose feedback is added one by one; that of earlier columns is one matrix product


def gptq(weights: Float32, gram: Float32, settings: Int4Settings, pool: Executor) -> tuple[Float32, Grid]:
    """Values 0..15 as floats [in, out] and their grid, for ``weights`` [in, out] and E[x x'] ``gram`` [in, in].

    With ``act_order`` the columns of the largest inputs come first, against scales that were fixed before; without it
    the scales of a group are found when its turn comes, from weights that carry the feedback.
    """
    hessian = damped(gram, settings.damping)
    if not settings.act_order:
        return _in_order(weights, hessian, settings, pool)
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    feedback, pivots = _factorize(hessian[np.ix_(order, order)])
    grid = _find_grid(weights, pivots[np.argsort(order, kind="stable")], settings, pool)
    groups = order // settings.group_size
    values = np.empty_like(weights)
    values[order] = _round_columns(weights[order], feedback, grid.scales[groups], grid.zeros[groups])
    return values, grid


def _in_order(weights: Float32, hessian: Float32, settings: Int4Settings, pool: Executor) -> tuple[Float32, Grid]:
    (feedback, pivots), size = _factorize(hessian), settings.group_size
    values, errors = np.empty_like(weights), np.empty_like(weights)
    grids: list[Grid] = []
    for begin in range(0, len(weights), size):
        rows = slice(begin, begin + size)
        target = weights[rows] + feedback[:begin, rows].T @ errors[:begin]
        grid = _find_grid(target, pivots[rows], settings, pool)
        grids.append(grid)
        repeated = (np.repeat(part, size, axis=0) for part in (grid.scales, grid.zeros))
        values[rows], errors[rows] = _round_block(target, weights[rows], feedback[rows, rows], *repeated)
    scales, zeros = (np.concatenate([getattr(grid, part) for grid in grids]) for part in ("scales", "zeros"))
    return values, Grid(scales, zeros, np.result_type(*(grid.dtype for grid in grids)))


def _find_grid(weights: Float32, pivots: Float32, settings: Int4Settings, pool: Executor) -> Grid:
    """``pivots`` [in]: entries of D. The output error that feedback leaves is that of each column times its pivot."""
    if settings.scale == "absmax":
        return range_grid(weights, settings.group_size, symmetric=settings.symmetric)
    return search_grid(weights, settings.group_size, pivots, pool, symmetric=settings.symmetric)


def damped(gram: Float32, damping: float, factors: Float32 | None = None) -> Float32:
    """The Gram matrix over its mean diagonal, with ``damping`` added to it: columns that saw nothing stay solvable.

    ``factors`` [in], that the inputs were divided by: mean and damping are those of the inputs before. Large columns
    then damp the small ones as much as they would have without AWQ, which makes all alike.
    """
    squares = np.ones(len(gram), np.float32) if factors is None else np.square(factors)
    mean = np.float32(np.einsum("ii,i->", gram, squares, dtype=np.float64) / len(gram))
    hessian = gram / mean if mean > 0 else np.zeros_like(gram)
    np.einsum("ii->i", hessian)[:] += np.float32(damping) / squares
    return hessian


def _factorize(hessian: Float32) -> tuple[Float32, Float32]:
    """U [in, in] and the diagonal of D [in] of H = (U + I) D (U + I)'."""
    # Cholesky gives lower factors, which eliminate from the first column on; reversed, from the last.
    upper = np.linalg.cholesky(hessian[::-1, ::-1].astype(np.float64))[::-1, ::-1]
    diagonal = np.diagonal(upper)
    return np.triu(upper / diagonal, 1).astype(np.float32), np.square(diagonal).astype(np.float32)


def _round_columns(weights: Float32, feedback: Float32, scales: Float32, zeros: Float32) -> Float32:
    """All [in, out] but ``feedback`` [in, in]; a scale for every column."""
    values, errors = np.empty_like(weights), np.empty_like(weights)
    for begin in range(0, len(weights), _BLOCK):
        rows = slice(begin, min(begin + _BLOCK, len(weights)))
        target = weights[rows] + feedback[:begin, rows].T @ errors[:begin]
        values[rows], errors[rows] = _round_block(
            target, weights[rows], feedback[rows, rows], scales[rows], zeros[rows]
        )
    return values


def _round_block(
    target: Float32, weights: Float32, feedback: Float32, scales: Float32, zeros: Float32
) -> tuple[Float32, Float32]:
    """Values and errors of neighbouring columns; ``target`` carries the feedback of all columns before them."""
    values, errors = np.empty_like(weights), np.empty_like(weights)
    for k in range(len(weights)):
        wanted = target[k] + feedback[:k, k] @ errors[:k]
        wanted /= scales[k]
        np.rint(wanted, out=wanted)
        wanted += zeros[k]
        np.clip(wanted, 0, 15, out=values[k])
        errors[k] = weights[k] - (values[k] - zeros[k]) * scales[k]
    return values, errors
