"""Scales that cost the outputs least: the range of each group shrunk in steps, the errors weighed by the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import FACTORS, Grid, range_grid, stored

Float32 = npt.NDArray[np.float32]

_OUTPUTS = 1024  # of one task: the arrays of a group then stay in a core's second-level cache


def search_grid(weights: Float32, group_size: int, moments: Float32, pool: Executor, *, symmetric: bool) -> Grid:
    """Of twenty scales per group of ``weights`` [in, out], the one of the least squared output error.

    ``moments`` of the inputs: E[x^2], [in], takes them as uncorrelated; the Gram matrix, [in, in], accounts for the
    correlations within a group.
    """
    base = range_grid(weights, group_size, symmetric=symmetric)
    best = np.empty_like(base.scales)

    def search(place: tuple[int, int]) -> None:
        group, begin = place
        rows, outputs = slice(group * group_size, (group + 1) * group_size), slice(begin, begin + _OUTPUTS)
        within = moments[rows, rows] if moments.ndim == 2 else moments[rows]
        block = np.ascontiguousarray(weights[rows, outputs])
        part = Grid(base.scales[group, outputs], base.zeros[group, outputs], base.dtype)
        best[group, outputs] = _search_group(block, within, part)

    # The tasks write to different places; waiting for all of them also raises what one of them raised.
    list(pool.map(search, _places(len(best), weights.shape[1])))
    return Grid(best, base.zeros, base.dtype)


def _places(num_groups: int, num_outputs: int) -> Iterator[tuple[int, int]]:
    return ((group, begin) for group in range(num_groups) for begin in range(0, num_outputs, _OUTPUTS))


def _search_group(block: Float32, moments: Float32, base: Grid) -> Float32:
    """``block`` [group_size, out], ``moments`` [group_size] or square; returns scales [out]."""
    best, least = base.scales, np.full(block.shape[1], np.inf, np.float32)
    errors = np.empty_like(block)
    low, high = -base.zeros, 15 - base.zeros
    # In units of the group's mean, so that huge and tiny activations stay within float32.
    mean = np.float32(np.trace(moments) / len(moments) if moments.ndim == 2 else moments.mean())
    moments = moments / mean if mean > 0 else np.ones_like(moments)
    for factor in FACTORS:
        scales = stored(base.scales * np.float32(factor), base.dtype)
        steps = block * (1 / scales)
        np.rint(steps, out=errors)
        np.maximum(errors, low, out=errors)
        np.minimum(errors, high, out=errors)
        errors -= steps
        error = _weighted(errors, moments) * np.square(scales / base.scales)
        better = error < least
        best, least = np.where(better, scales, best), np.where(better, error, least)
    return best


def _weighted(errors: Float32, moments: Float32) -> Float32:
    if moments.ndim == 1:
        return np.asarray(moments @ np.square(errors), np.float32)
    return np.asarray(np.einsum("io,io->o", moments @ errors, errors), np.float32)
