"""Scales that cost the outputs least: the range of each group shrunk in steps, the errors weighed by the inputs."""

from __future__ import annotations

from concurrent.futures import Executor
from itertools import product

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import FACTORS, Grid, range_grid, stored
from quantize.native.feedback import native_feedback
from quantize.tiles import run_all, tiles

Float32 = npt.NDArray[np.float32]

_OUTPUTS = 1024  # of one task: the arrays of a group then stay in a core's second-level cache


def search_grid(weights: Float32, group_size: int, moments: Float32, pool: Executor, *, symmetric: bool) -> Grid:
    """Of twenty scales per group of ``weights`` [in, out], the one of the least squared output error.

    ``moments`` of the inputs: E[x^2], [in], takes them as uncorrelated; the Gram matrix, [in, in], accounts for the
    correlations within a group.
    """
    base = range_grid(weights, group_size, symmetric=symmetric)
    best = np.empty_like(base.scales)

    def search(place: tuple[int, slice]) -> None:
        group, outputs = place
        rows = slice(group * group_size, (group + 1) * group_size)
        within = moments[rows, rows] if moments.ndim == 2 else moments[rows]
        part = Grid(base.scales[group, outputs], base.zeros[group, outputs], base.dtype)
        best[group, outputs] = _search_group(weights[rows, outputs], within, part)

    run_all(pool, search, product(range(len(best)), tiles(weights.shape[1], _OUTPUTS)))
    return Grid(best, base.zeros, base.dtype)


def _search_group(block: Float32, moments: Float32, base: Grid) -> Float32:
    """``block`` [group_size, out], ``moments`` [group_size] or square; returns scales [out]."""
    # In units of the group's mean, so that huge and tiny activations stay within float32.
    mean = np.float32(np.trace(moments) / len(moments) if moments.ndim == 2 else moments.mean())
    moments = moments / mean if mean > 0 else np.ones_like(moments)
    native = native_feedback()
    if native is not None and moments.ndim == 1:
        is_half = base.dtype == np.float16
        return native.search_scales(block, moments, base.scales, base.zeros, FACTORS, half=is_half)
    best, least = base.scales, np.full(block.shape[1], np.inf, np.float32)
    errors = np.empty(block.shape, np.float32)
    for factor in FACTORS:
        scales = stored(base.scales * np.float32(factor), base.dtype)
        step_errors(block, scales, base.zeros, errors)
        error = _weighted(errors, moments) * np.square(scales / base.scales)
        better = error < least
        best, least = np.where(better, scales, best), np.where(better, error, least)
    return best


def step_errors(block: Float32, scales: Float32, zeros: Float32, errors: Float32) -> None:
    """What rounding ``block`` [n, out] to 0..15 leaves, in units of ``scales`` [out], into ``errors`` [n, out]."""
    native = native_feedback()
    if native is not None:
        native.step_errors(block, scales, zeros, errors)
        return
    steps = block * (1 / scales)
    np.clip(np.rint(steps), -zeros, 15 - zeros, out=errors)
    errors -= steps


def _weighted(errors: Float32, moments: Float32) -> Float32:
    """Squared errors [out] of ``errors`` [n, out], which are used up."""
    if moments.ndim == 2:
        errors *= moments @ errors
        return np.asarray(errors.sum(axis=0), np.float32)
    return np.asarray((moments[:, None] * np.square(errors)).sum(axis=0), np.float32)
