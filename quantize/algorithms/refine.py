"""After rounding: integers and scales settle together, each the best for the other, through the Gram matrix.

In turns: a sweep of coordinate descent over the columns (QuantEase, arXiv 2309.01885), where each value moves to the
grid point of the least output error, all others given; then, given the integers, an output's scales by least squares.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantize.algorithms.block_feedback import descend_block
from quantize.algorithms.grid import Grid, Values, decode, stored
from quantize.algorithms.symmetric import damped
from quantize.tiles import output_tiles, run_all
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]

_ROUNDS = 3  # the first brings two thirds of what there is to gain, the fourth 2% of the error
_BLOCK = 64  # columns whose changes are followed one by one; the gradient of the others is one matrix product
_RIDGE = 1e-3  # towards the scales before, as a share of the mean: a group of zeros leaves its scale undetermined
_LARGEST_CHANGE = 1.3  # of a scale; more than this was fitted to noise


def refine(
    weights: Float32,
    rounded: tuple[Values, Grid],
    gram: Float32,
    settings: Int4Settings,
    pool: Executor,
    factors: Float32 | None = None,
) -> tuple[Values, Grid]:
    """Better values [in, out] and grid than ``rounded``, whose zeros stay; the values are changed in place.

    For ``weights`` [in, out] and E[x x'] ``gram`` [in, in] of inputs that were divided by AWQ's ``factors`` [in].
    """
    values, grid = rounded
    scales = grid.scales.copy()

    def task(outputs: slice) -> None:
        part, block = grid.columns(outputs.start, outputs.stop), np.ascontiguousarray(weights[:, outputs])
        better, products = np.ascontiguousarray(values[:, outputs]), gram @ block
        for _ in range(_ROUNDS):
            better = descend(block, better, part, gram)
            part = replace(part, scales=_fitted_scales(products, better, part, gram))
        values[:, outputs], scales[:, outputs] = better, part.scales

    with damped(gram, settings.damping, factors):
        run_all(pool, task, output_tiles(*weights.shape))
    return values, replace(grid, scales=scales)


def descend(weights: Float32, values: Values, grid: Grid, hessian: Float32) -> Values:
    """One sweep over the columns; the damped output error tr(dW' H dW) never grows. All [in, out]."""
    groups = np.repeat(np.arange(len(grid.scales), dtype=np.int32), len(weights) // len(grid.scales))
    errors = decode(values, grid)
    errors -= weights
    values = values.copy()
    for begin in range(0, len(weights), _BLOCK):
        rows = slice(begin, min(begin + _BLOCK, len(weights)))
        gradient = hessian[rows] @ errors
        descend_block(gradient, errors[rows], weights[rows], hessian[rows, rows], grid, groups[rows], values[rows])
    return values


def _fitted_scales(wanted_products: Float32, values: Values, grid: Grid, hessian: Float32) -> Float32:
    """Scales [num_groups, out] of the least output error, as they are stored.

    ``wanted_products`` [in, out] is the hessian times the weights, the same in every round.
    """
    num_groups, out = grid.scales.shape
    size = len(values) // num_groups
    steps = np.subtract(values, np.repeat(grid.zeros, size, axis=0), dtype=np.float32)
    wanted = _by_group(steps * wanted_products, num_groups)
    products = np.empty((out, num_groups, num_groups))
    for group in range(num_groups):
        rows = slice(group * size, (group + 1) * size)
        # Symmetric: of the groups after this one it is known from their side.
        own = _by_group((hessian[: rows.stop, rows] @ steps[rows]) * steps[: rows.stop], group + 1)
        products[:, : group + 1, group] = products[:, group, : group + 1] = own
    ridge = _RIDGE * np.einsum("ogg->og", products).mean(axis=1, keepdims=True) + np.finfo(np.float32).tiny
    np.einsum("ogg->og", products)[:] += ridge
    found = np.linalg.solve(products, (wanted + ridge * grid.scales.T)[..., None])[..., 0].T
    found = np.clip(found, grid.scales / _LARGEST_CHANGE, grid.scales * _LARGEST_CHANGE)
    return stored(np.asarray(found, np.float32), grid.dtype)


def _by_group(terms: Float32, num_groups: int) -> Float32:
    """[in, out] summed within each group: [out, num_groups]."""
    return np.asarray(terms.reshape(num_groups, -1, terms.shape[1]).sum(axis=1).T, np.float32)
