"""AWQ (arXiv 2306.00978): columns of large inputs are scaled up before rounding, and their inputs down.

The search needs no tokens: through the Gram matrix G of the inputs the squared error of the outputs is tr(dW G dW').
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import decode, encode, range_grid
from quantize.algorithms.symmetric import quadratic
from quantize.tiles import tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]

ALPHAS = tuple(float(alpha) for alpha in np.linspace(0.0, 1.0, 11).round(2))
_OUTPUTS = 128  # of one task
_MOST_OUTPUTS = 512  # that the strength is chosen by: it is one number for all of them


def search_factors(
    weights: Float32, gram: Float32, mean_square: Float32, settings: Int4Settings, pool: Executor
) -> Float32:
    """Factors [in] of the columns of a weight matrix, given transposed: ``weights`` [in, out].

    ``gram`` [in, in] is E[x x']. ``mean_square`` [in] decides the factors: equal entries, of columns whose inputs can
    only be scaled together, get equal factors. Of eleven strengths the one of the least output error is taken, over
    some hundred outputs that stand for all; the first of them leaves all as it is.
    """
    candidates = [_factors(mean_square, alpha) for alpha in ALPHAS]
    sample = weights[:, :: -(-weights.shape[1] // _MOST_OUTPUTS)]

    def errors(outputs: slice) -> list[float]:
        block = np.ascontiguousarray(sample[:, outputs])
        return [_output_error(block, gram, factors, settings) for factors in candidates]

    # Summed in the order of the outputs, whichever task ends first: the same bytes every time.
    totals = np.sum(list(pool.map(errors, tiles(sample.shape[1], _OUTPUTS))), axis=0)
    return candidates[int(np.argmin(totals))]


def _factors(mean_square: Float32, alpha: float) -> Float32:
    """E[x^2]^(alpha / 2), with the geometric mean of the extremes at 1."""
    magnitudes = np.sqrt(mean_square.astype(np.float64))
    # Columns that saw nothing count as the weakest that did.
    weakest = magnitudes[magnitudes > 0].min(initial=np.inf)
    factors = np.maximum(magnitudes, weakest if np.isfinite(weakest) else 1.0) ** alpha
    return np.asarray(factors / np.sqrt(factors.max() * factors.min()), np.float32)


def _output_error(weights: Float32, gram: Float32, factors: Float32, settings: Int4Settings) -> float:
    scaled = weights * factors[:, None]
    grid = range_grid(scaled, settings.group_size, symmetric=settings.symmetric)
    change = decode(encode(scaled, grid), grid)
    change /= factors[:, None]
    change -= weights
    return quadratic(gram, change)
