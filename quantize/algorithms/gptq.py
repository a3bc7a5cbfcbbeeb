"""GPTQ (arXiv 2210.17323): column by column, what rounding one column did to the outputs is made good in the next.

Written as LDLQ (QuIP, arXiv 2307.13304, which proves it equal): with H = (U + I) D (U + I)' and U strictly upper
triangular, column k is rounded at w_k + sum over j < k of (w_j - q_j) U[j, k]. One Cholesky factor and no inverse:
columns are laid out from the last to the first, so that it is the lower one, which eliminates from the first on.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic, product
from quantize.algorithms.block_feedback import round_block
from quantize.algorithms.cholesky import factorized
from quantize.algorithms.grid import Grid, range_grid
from quantize.algorithms.scale_search import search_grid
from quantize.algorithms.symmetric import damped, reordered
from quantize.tiles import tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]
Values = npt.NDArray[np.uint8]
F = TypeVar("F")

_BLOCK = 128  # columns whose feedback is added one by one; that of earlier columns is one matrix product
_OUTPUTS = 2048  # at a time: their errors are kept until the last column is rounded


def gptq(
    weights: Float32, gram: Float32, settings: Int4Settings, pool: Executor, arithmetic: Arithmetic[Any]
) -> tuple[Values, Grid]:
    """Values 0..15 [in, out] and their grid, for ``weights`` [in, out] and E[x x'] ``gram`` [in, in].

    ``arithmetic`` is that of the feedback from block to block.

    With ``act_order`` the columns of the largest inputs come first, against scales that were fixed before; without it
    the scales of a group are found when its turn comes, from weights that carry the feedback.
    """
    order = np.arange(len(gram))
    if settings.act_order:
        order = np.argsort(-np.diagonal(gram), kind="stable")
    order = order[::-1]
    with reordered(gram, order, pool), damped(gram, settings.damping), factorized(gram, pool) as factor:
        columns = _Columns(factor.lower, order, settings, pool, arithmetic)
        return columns.against_fixed_scales(weights) if settings.act_order else columns.group_by_group(weights)


@dataclass(frozen=True)
class _Columns:
    """The columns of ``weights`` [in, out] in their ``order``, the last one first."""

    lower: Float32
    order: npt.NDArray[np.int64]
    settings: Int4Settings
    pool: Executor
    arithmetic: Arithmetic[Any]

    def against_fixed_scales(self, weights: Float32) -> tuple[Values, Grid]:
        pivots = np.empty(len(self.order), np.float32)
        pivots[self.order] = np.square(np.diagonal(self.lower))
        grid = _find_grid(weights, pivots, self.settings, self.pool)
        values = np.empty(weights.shape, np.uint8)
        for begin in range(0, weights.shape[1], _OUTPUTS):
            outputs = slice(begin, begin + _OUTPUTS)
            rounding = self._begin(weights[self.order, outputs], self.order // self.settings.group_size)
            for rows in reversed(_blocks(len(self.order), _BLOCK)):
                rounding.round(rows, rounding.target(rows), grid.columns(outputs.start, outputs.stop))
            values[self.order, outputs] = rounding.values
        return values, grid

    def group_by_group(self, weights: Float32) -> tuple[Values, Grid]:
        size, pivots = self.settings.group_size, np.square(np.diagonal(self.lower))
        shape = len(self.order) // size, weights.shape[1]
        scales, zeros = np.empty(shape, np.float32), np.empty(shape, np.float32)
        rounding, dtypes = self._begin(weights[self.order], self.order // size), []
        for group, rows in enumerate(reversed(_blocks(len(self.order), size))):
            target = rounding.target(rows)
            found = _find_grid(target, pivots[rows], self.settings, self.pool)
            scales[group], zeros[group] = found.scales[0], found.zeros[0]
            dtypes.append(found.dtype)
            rounding.round(rows, target, Grid(scales, zeros, found.dtype))
        values = np.empty(weights.shape, np.uint8)
        values[self.order] = rounding.values
        return values, Grid(scales, zeros, np.result_type(*dtypes))

    def _begin(self, weights: Float32, groups: npt.NDArray[np.int64]) -> _Rounding[Any]:
        return _Rounding(weights, self.lower, groups, self.pool, self.arithmetic)


class _Rounding(Generic[F]):
    """All arrays [in, ...] have the column that comes first last. U[j, k] is ``lower[j, k] / lower[k, k]``."""

    def __init__(
        self,
        weights: Float32,
        lower: Float32,
        groups: npt.NDArray[np.int64],
        pool: Executor,
        arithmetic: Arithmetic[F],
    ) -> None:
        self._weights, self._lower, self._pool, self._arithmetic = weights, lower, pool, arithmetic
        self._groups = groups.astype(np.int32)
        self._tiles = tiles(weights.shape[1])
        self._errors = list(pool.map(lambda tile: arithmetic.pack(np.zeros_like(weights[:, tile])), self._tiles))
        self.values = np.empty(weights.shape, np.uint8)

    def target(self, rows: slice) -> Float32:
        """Weights with the feedback of all columns that came before."""
        target, own = self._weights[rows].copy(), np.diagonal(self._lower)[rows]
        before = self._arithmetic.pack(self._lower[rows.stop :, rows] / own)

        def add(outputs: slice, errors: F) -> None:
            part = target[:, outputs]
            part += product(self._arithmetic, before, self._arithmetic.rest(errors, rows.stop), part.shape)

        list(self._pool.map(add, self._tiles, self._errors))
        return target

    def round(self, rows: slice, target: Float32, grid: Grid) -> None:
        """``target``, which is used up, to values and errors; the ``grid`` is that of all columns."""
        within = self._lower[rows, rows] / np.diagonal(self._lower)[rows]

        def task(outputs: slice, errors: F) -> None:
            own = np.empty_like(target[:, outputs])
            round_block(
                target[:, outputs],
                self._weights[rows, outputs],
                within,
                grid.columns(outputs.start, outputs.stop),
                self._groups[rows],
                self.values[rows, outputs],
                own,
            )
            self._arithmetic.replace(errors, rows.start, own)

        list(self._pool.map(task, self._tiles, self._errors))


def _find_grid(weights: Float32, pivots: Float32, settings: Int4Settings, pool: Executor) -> Grid:
    """``pivots`` [in]: entries of D. The output error that feedback leaves is that of each column times its pivot."""
    if settings.scale == "absmax":
        return range_grid(weights, settings.group_size, symmetric=settings.symmetric)
    return search_grid(weights, settings.group_size, pivots, pool, symmetric=settings.symmetric)


def _blocks(size: int, width: int) -> list[slice]:
    """From the back, where the first columns lie, each ``width`` wide but the first, which comes last."""
    return [slice(max(end - width, 0), end) for end in range(size, 0, -width)][::-1]
