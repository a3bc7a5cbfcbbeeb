"""After rounding: integers and scales settle together, each the best for the other, through the Gram matrix.

In turns: a sweep of coordinate descent over the columns (QuantEase, arXiv 2309.01885), where each value moves to the
grid point of the least output error, all others given; then, given the integers, an output's scales by least squares.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantize.algorithms.gptq import damped
from quantize.algorithms.grid import Grid, decode, stored
from quantize.recipe import Int4Settings

Float32 = npt.NDArray[np.float32]

_ROUNDS = 3  # the first brings two thirds of what there is to gain, the fourth 2% of the error
_BLOCK = 64  # columns whose changes are followed one by one; the gradient of the others is one matrix product
_OUTPUTS = 512  # of one task
_RIDGE = 1e-3  # towards the scales before, as a share of the mean: a group of zeros leaves its scale undetermined
_LARGEST_CHANGE = 1.3  # of a scale; more than this was fitted to noise


def refine(
    weights: Float32,
    rounded: tuple[Float32, Grid],
    gram: Float32,
    settings: Int4Settings,
    pool: Executor,
    factors: Float32 | None = None,
) -> tuple[Float32, Grid]:
    """Better values [in, out] and grid than ``rounded``, whose zeros stay.

    For ``weights`` [in, out] and E[x x'] ``gram`` [in, in] of inputs that were divided by AWQ's ``factors`` [in].
    """
    (values, grid), hessian = rounded, damped(gram, settings.damping, factors)

    def task(begin: int) -> tuple[Float32, Float32]:
        outputs = slice(begin, begin + _OUTPUTS)
        part, block = grid.columns(begin, begin + _OUTPUTS), np.ascontiguousarray(weights[:, outputs])
        better, products = np.ascontiguousarray(values[:, outputs]), hessian @ block
        for _ in range(_ROUNDS):
            better = descend(block, better, part, hessian)
            part = replace(part, scales=_fitted_scales(products, better, part, hessian))
        return better, part.scales

    parts = list(pool.map(task, range(0, weights.shape[1], _OUTPUTS)))
    scales = np.concatenate([scales for _, scales in parts], axis=1)
    return np.concatenate([better for better, _ in parts], axis=1), replace(grid, scales=scales)


def descend(weights: Float32, values: Float32, grid: Grid, hessian: Float32) -> Float32:
    """One sweep over the columns; the damped output error tr(dW' H dW) never grows. All [in, out]."""
    size = len(weights) // len(grid.scales)
    scales, zeros = (np.repeat(part, size, axis=0) for part in (grid.scales, grid.zeros))
    errors = decode(values, grid) - weights
    values = values.copy()
    for begin in range(0, len(weights), _BLOCK):
        rows = slice(begin, min(begin + _BLOCK, len(weights)))
        gradient, within = hessian[rows] @ errors, hessian[rows, rows]
        moves = np.zeros_like(gradient)
        for k, column in enumerate(range(rows.start, rows.stop)):
            slope = gradient[k] + within[k, :k] @ moves[:k]
            wanted = (weights[column] + errors[column] - slope / within[k, k]) / scales[column]
            values[column] = np.clip(np.rint(wanted) + zeros[column], 0, 15)
            error = (values[column] - zeros[column]) * scales[column] - weights[column]
            moves[k] = error - errors[column]
            errors[column] = error
    return values


def _fitted_scales(wanted_products: Float32, values: Float32, grid: Grid, hessian: Float32) -> Float32:
    """Scales [num_groups, out] of the least output error, as they are stored.

    ``wanted_products`` [in, out] is the hessian times the weights, the same in every round.
    """
    num_groups, out = grid.scales.shape
    size = len(values) // num_groups
    steps = values - np.repeat(grid.zeros, size, axis=0)
    wanted = _by_group(steps * wanted_products, num_groups)
    products = np.empty((out, num_groups, num_groups))
    for group in range(num_groups):
        rows = slice(group * size, (group + 1) * size)
        products[:, :, group] = _by_group((hessian[:, rows] @ steps[rows]) * steps, num_groups)
    ridge = _RIDGE * np.einsum("ogg->og", products).mean(axis=1, keepdims=True) + np.finfo(np.float32).tiny
    np.einsum("ogg->og", products)[:] += ridge
    found = np.linalg.solve(products, (wanted + ridge * grid.scales.T)[..., None])[..., 0].T
    found = np.clip(found, grid.scales / _LARGEST_CHANGE, grid.scales * _LARGEST_CHANGE)
    return stored(np.asarray(found, np.float32), grid.dtype)


def _by_group(terms: Float32, num_groups: int) -> Float32:
    """[in, out] summed within each group: [out, num_groups]."""
    return np.asarray(terms.reshape(num_groups, -1, terms.shape[1]).sum(axis=1).T, np.float32)
