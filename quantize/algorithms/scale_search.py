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

    ``moments`` [in]: E[x^2] of the inputs, which count as uncorrelated.
    """
    base = range_grid(weights, group_size, symmetric=symmetric)
    best = np.empty_like(base.scales)

    def search(place: tuple[int, slice]) -> None:
        group, outputs = place
        rows = slice(group * group_size, (group + 1) * group_size)
        part = Grid(base.scales[group, outputs], base.zeros[group, outputs], base.dtype)
        best[group, outputs] = _search_group(weights[rows, outputs], moments[rows], part)

    run_all(pool, search, product(range(len(best)), tiles(weights.shape[1], _OUTPUTS)))
    return Grid(best, base.zeros, base.dtype)


def _search_group(block: Float32, moments: Float32, base: Grid) -> Float32:
    """``block`` [group_size, out], ``moments`` [group_size]; returns scales [out]."""
    # In units of the group's mean, so that huge and tiny activations stay within float32.
    mean = moments.mean()
    moments = moments / mean if mean > 0 else np.ones_like(moments)
    native = native_feedback()
    if native is not None:
        is_half = base.dtype == np.float16
        return native.search_scales(block, moments, base.scales, base.zeros, FACTORS, half=is_half)
    best, least = base.scales, np.full(block.shape[1], np.inf, np.float32)
    for factor in FACTORS:
        scales = stored(base.scales * np.float32(factor), base.dtype)
        steps = block * (1 / scales)
        errors = np.clip(np.rint(steps), -base.zeros, 15 - base.zeros) - steps
        error = (moments[:, None] * np.square(errors)).sum(axis=0) * np.square(scales / base.scales)
        better = error < least
        best, least = np.where(better, scales, best), np.where(better, error, least)
    return best
