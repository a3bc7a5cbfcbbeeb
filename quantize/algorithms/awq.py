"""AWQ (arXiv 2306.00978): columns of large inputs are scaled up before rounding, and their inputs down.

The search needs no tokens: through the Gram matrix G of the inputs the squared error of the outputs is tr(dW G dW').
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic
from quantize.algorithms.grid import decode, encode, range_grid
from quantize.algorithms.symmetric import quadratic
from quantize.tiles import run_all, tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]

ALPHAS = tuple(float(alpha) for alpha in np.linspace(0.0, 1.0, 11).round(2))
_OUTPUTS = 64  # of one task


def search_factors(
    weights: Float32,
    gram: Float32,
    mean_square: Float32,
    settings: Int4Settings,
    pool: Executor,
    arithmetic: Arithmetic[Any],
) -> Float32:
    """Factors [in] of the columns of a weight matrix, given transposed: ``weights`` [in, out], of outputs that stand
    for all.

    ``gram`` [in, in] is E[x x']. ``mean_square`` [in] decides the factors: equal entries, of columns whose inputs can
    only be scaled together, get equal factors. Of eleven strengths the one of the least output error is taken (of every
    second, then of its neighbours); the first of them leaves all as it is. ``arithmetic`` is that of errors.
    """
    change = np.empty_like(weights)

    @cache
    def error(strength: int) -> float:
        factors = _factors(mean_square, ALPHAS[strength])

        def round_some(outputs: slice) -> None:
            change[:, outputs] = _change(weights[:, outputs], factors, settings)

        run_all(pool, round_some, tiles(weights.shape[1], _OUTPUTS))
        return quadratic(gram, change, pool, arithmetic)

    best = min(range(0, len(ALPHAS), 2), key=error)
    around = range(max(best - 1, 0), min(best + 2, len(ALPHAS)))
    return _factors(mean_square, ALPHAS[min(around, key=error)])


def _factors(mean_square: Float32, alpha: float) -> Float32:
    """E[x^2]^(alpha / 2), with the geometric mean of the extremes at 1."""
    magnitudes = np.sqrt(mean_square.astype(np.float64))
    # Columns that saw nothing count as the weakest that did.
    weakest = magnitudes[magnitudes > 0].min(initial=np.inf)
    factors = np.maximum(magnitudes, weakest if np.isfinite(weakest) else 1.0) ** alpha
    return np.asarray(factors / np.sqrt(factors.max() * factors.min()), np.float32)


def _change(weights: Float32, factors: Float32, settings: Int4Settings) -> Float32:
    """What rounding does to ``weights`` [in, outputs], scaled by ``factors`` meanwhile."""
    scaled = weights * factors[:, None]
    grid = range_grid(scaled, settings.group_size, symmetric=settings.symmetric)
    change = decode(encode(scaled, grid), grid)
    change /= factors[:, None]
    change -= weights
    return change
