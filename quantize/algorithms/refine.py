"""After rounding: integers and scales settle together, each the best for the other, through the Gram matrix.

Coordinate descent (QuantEase, arXiv 2309.01885), all else given: a group's scale by least squares, then each of its
values to the grid point of the least output error. Both need the same gradient, one product of the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic, product
from quantize.algorithms.block_feedback import descend_block, fit_scales, times_steps
from quantize.algorithms.grid import Grid, Values, decode
from quantize.algorithms.symmetric import damped
from quantize.tiles import output_tiles, run_all
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]
F = TypeVar("F")

_ROUNDS = 2
_BLOCK = 64  # rows of a group whose changes are followed one by one; the gradient of the others is one matrix product
_LARGEST_CHANGE = 1.3  # of a scale; more than this was fitted to noise


def refine(
    weights: Float32,
    rounded: tuple[Values, Grid],
    gram: Float32,
    settings: Int4Settings,
    pool: Executor,
    arithmetic: Arithmetic[Any],
    factors: Float32 | None = None,
) -> tuple[Values, Grid]:
    """Better values [in, out] and grid than ``rounded``, whose zeros stay; the values are changed in place.

    For ``weights`` [in, out] and E[x x'] ``gram`` [in, in] of inputs that were divided by AWQ's ``factors`` [in].
    ``arithmetic`` is that of gradients.
    """
    values, grid = rounded
    scales = Grid(grid.scales.copy(), grid.zeros, grid.dtype)

    def tile(outputs: slice) -> _Tile[Any]:
        begin, end = outputs.start, outputs.stop
        own = weights[:, outputs], values[:, outputs], scales.columns(begin, end), grid.scales[:, outputs]
        return _Tile(*own, arithmetic.pack(decode(own[1], own[2]) - own[0]), arithmetic)

    tiles = list(pool.map(tile, output_tiles(*weights.shape)))
    groups = _groups(len(grid.scales), len(gram)) * _ROUNDS
    with damped(gram, settings.damping, factors):
        for number, (rows, columns) in enumerate(zip(groups, _packed(gram, groups, pool, arithmetic), strict=True)):
            group = number % len(grid.scales)
            run_all(pool, partial(_Tile.settle, group=group, rows=rows, columns=columns, gram=gram), tiles)
    return values, scales


def _packed(gram: Float32, groups: Sequence[slice], pool: Executor, arithmetic: Arithmetic[F]) -> Iterator[F]:
    """Columns of a group for all tiles at once, read from the large matrix while those before are multiplied."""
    following = pool.submit(arithmetic.pack, gram[:, groups[0]])
    for rows in groups[1:]:
        packed, following = following.result(), pool.submit(arithmetic.pack, gram[:, rows])
        yield packed
    yield following.result()


def _groups(num_groups: int, size: int) -> list[slice]:
    return [slice(group * size // num_groups, (group + 1) * size // num_groups) for group in range(num_groups)]


@dataclass(frozen=True)
class _Tile(Generic[F]):
    """Some of the outputs: views, [in, out] or [num_groups, out]."""

    weights: Float32
    values: Values
    grid: Grid
    first_scales: Float32
    errors: F  # of the decoded values, as a factor of products
    arithmetic: Arithmetic[F]

    def settle(self, group: int, rows: slice, columns: F, gram: Float32) -> None:
        """One group, which has these ``rows`` of the weights: ``columns`` of the damped ``gram``."""
        weights, values, within = self.weights[rows], self.values[rows], gram[rows, rows]
        own = Grid(self.grid.scales[group, None], self.grid.zeros[group, None], self.grid.dtype)
        gradient = product(self.arithmetic, columns, self.errors, weights.shape)
        of_steps = times_steps(within, values, own.zeros[0])
        errors = np.empty_like(gradient)
        fit_scales(gradient, of_steps, weights, values, errors, own, self.first_scales[group], _LARGEST_CHANGE)
        descend(weights, values, errors, own, within, gradient)
        self.arithmetic.replace(self.errors, rows.start, errors)


def descend(weights: Float32, values: Values, errors: Float32, grid: Grid, within: Float32, gradient: Float32) -> None:
    """One sweep over rows of one group; the output error tr(dW' H dW) never grows. All [n, out] but ``within`` [n, n].

    ``gradient``, which is used up, is H times the errors, and ``within`` the block of H, of these rows. ``values`` and
    ``errors`` (of the decoded values to ``weights``) are replaced.
    """
    groups = np.zeros(len(weights), np.int32)
    for begin in range(0, len(weights), _BLOCK):
        rows, after = slice(begin, begin + _BLOCK), slice(begin + _BLOCK, None)
        before = errors[rows].copy()
        descend_block(gradient[rows], errors[rows], weights[rows], within[rows, rows], grid, groups[rows], values[rows])
        if after.start < len(weights):
            gradient[after] += within[after, rows] @ (errors[rows] - before)
