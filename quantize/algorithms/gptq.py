"""GPTQ (arXiv 2210.17323): column by column, what rounding one column did to the outputs is made good in the next.

Written as LDLQ (QuIP, arXiv 2307.13304, which proves it equal): with H = (U + I) D (U + I)' and U strictly upper
triangular, column k is rounded at w_k + sum over j < k of (w_j - q_j) U[j, k]. One Cholesky factor and no inverse:
columns are laid out from the last to the first, so that it is the lower one, which eliminates from the first on.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial

import numpy as np
import numpy.typing as npt

from quantize.algorithms.block_feedback import round_block
from quantize.algorithms.cholesky import factorize
from quantize.algorithms.grid import Grid, range_grid
from quantize.algorithms.scale_search import search_grid
from quantize.tiles import run_all, tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]
Values = npt.NDArray[np.uint8]

_BLOCK = 128  # columns whose feedback is added one by one; that of earlier columns is one matrix product
_OUTPUTS = 4096  # at a time: their errors are kept until the last column is rounded


def gptq(weights: Float32, gram: Float32, settings: Int4Settings, pool: Executor) -> tuple[Values, Grid]:
    """Values 0..15 [in, out] and their grid, for ``weights`` [in, out] and E[x x'] ``gram`` [in, in].

    With ``act_order`` the columns of the largest inputs come first, against scales that were fixed before; without it
    the scales of a group are found when its turn comes, from weights that carry the feedback.
    """
    order = np.arange(len(gram))
    if settings.act_order:
        order = np.argsort(-np.diagonal(gram), kind="stable")
    order = order[::-1]
    feedback, pivots = _feedback(gram, order, settings.damping, pool)
    groups = order // settings.group_size
    values = np.empty(weights.shape, np.uint8)
    if not settings.act_order:
        rounding = _Rounding(weights[order], feedback, groups, pool)
        grid = _in_order(rounding, pivots, settings, pool)
        values[order] = rounding.values
        return values, grid
    by_column = np.empty_like(pivots)
    by_column[order] = pivots
    grid = _find_grid(weights, by_column, settings, pool)
    for begin in range(0, weights.shape[1], _OUTPUTS):
        outputs = slice(begin, begin + _OUTPUTS)
        rounding = _Rounding(weights[order, outputs], feedback, groups, pool)
        for rows in reversed(_blocks(len(order), _BLOCK)):
            rounding.round(rows, rounding.target(rows), grid.columns(outputs.start, outputs.stop))
        values[order, outputs] = rounding.values
    return values, grid


class _Rounding:
    """All arrays [in, ...] have the column that comes first last."""

    def __init__(self, weights: Float32, feedback: Float32, groups: npt.NDArray[np.int64], pool: Executor) -> None:
        self._weights, self._feedback, self._pool = weights, feedback, pool
        self._groups = groups.astype(np.int32)
        self._errors = np.empty_like(weights)
        self.values = np.empty(weights.shape, np.uint8)

    def target(self, rows: slice) -> Float32:
        """Weights with the feedback of all columns that came before."""
        target, before = self._weights[rows].copy(), slice(rows.stop, None)

        def add(outputs: slice) -> None:
            target[:, outputs] += self._feedback[before, rows].T @ self._errors[before, outputs]

        run_all(self._pool, add, tiles(target.shape[1]))
        return target

    def round(self, rows: slice, target: Float32, grid: Grid) -> None:
        """``target``, which is used up, to values and errors; the ``grid`` is that of all columns."""

        def task(outputs: slice) -> None:
            round_block(
                target[:, outputs],
                self._weights[rows, outputs],
                self._feedback[rows, rows],
                grid.columns(outputs.start, outputs.stop),
                self._groups[rows],
                self.values[rows, outputs],
                self._errors[rows, outputs],
            )

        run_all(self._pool, task, tiles(target.shape[1]))


def _in_order(rounding: _Rounding, pivots: Float32, settings: Int4Settings, pool: Executor) -> Grid:
    size = settings.group_size
    num_groups, out = len(pivots) // size, rounding.values.shape[1]
    scales, zeros = np.empty((num_groups, out), np.float32), np.empty((num_groups, out), np.float32)
    dtypes = []
    for group, rows in enumerate(reversed(_blocks(len(pivots), size))):
        target = rounding.target(rows)
        found = _find_grid(target, pivots[rows], settings, pool)
        scales[group], zeros[group] = found.scales[0], found.zeros[0]
        dtypes.append(found.dtype)
        rounding.round(rows, target, Grid(scales, zeros, found.dtype))
    return Grid(scales, zeros, np.result_type(*dtypes))


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
    mean = mean_diagonal(gram, factors)
    hessian = gram / mean if mean > 0 else np.zeros_like(gram)
    np.einsum("ii->i", hessian)[:] += np.float32(damping) / (1 if factors is None else np.square(factors))
    return hessian


def mean_diagonal(gram: Float32, factors: Float32 | None = None) -> np.float32:
    """E[x^2] over all columns, of the inputs before they were divided by ``factors`` [in]."""
    squares = np.ones(len(gram), np.float32) if factors is None else np.square(factors)
    return np.float32(np.einsum("ii,i->", gram, squares, dtype=np.float64) / len(gram))


def _feedback(gram: Float32, order: npt.NDArray[np.int64], damping: float, pool: Executor) -> tuple[Float32, Float32]:
    """L / diagonal(L) [in, in], of which what is below the diagonal counts, and D [in]; both in ``order``."""
    mean = mean_diagonal(gram)
    hessian = np.zeros_like(gram)
    run_all(pool, partial(_gather, gram, order, mean, hessian), tiles(len(order)) if mean > 0 else [])
    np.einsum("ii->i", hessian)[:] += np.float32(damping)
    lower = factorize(hessian, pool).lower
    diagonal = np.diagonal(lower).copy()
    run_all(pool, lambda rows: np.divide(lower[rows], diagonal, out=lower[rows]), tiles(len(order)))
    return lower, np.square(diagonal)


def _gather(gram: Float32, order: npt.NDArray[np.int64], mean: np.float32, hessian: Float32, rows: slice) -> None:
    np.divide(gram[order[rows]][:, order], mean, out=hessian[rows])


def _blocks(size: int, width: int) -> list[slice]:
    """From the back, where the first columns lie, each ``width`` wide but the first, which comes last."""
    return [slice(max(end - width, 0), end) for end in range(size, 0, -width)][::-1]
