"""The weights that make good what earlier layers did to the inputs, before they are rounded.

GPTQ and AWQ bring W^ X^ close to W X^, where X^ are the inputs that the layers quantized before make. What counts is
the unquantized model's W X (GPTAQ, arXiv 2504.02692). What comes nearest to it without rounding, W*, is a ridge
regression: with G = E[x^ x^'] and C = E[(x - x^) x^'], W* = W + W C (G + damping)^-1, and |W X - W^ X^| differs from
|W* X^ - W^ X^| by what no W^ can change. So W* is rounded in place of W, by any method that has G.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.algorithms.cholesky import factorized
from quantize.algorithms.symmetric import damped, mean_diagonal
from quantize.tiles import output_tiles, run_all

Float32 = npt.NDArray[np.float32]

# Share of the mean that is added to the diagonal: a few thousand tokens must not bend weights that they say little of.
_DAMPING = 0.1


def corrected_targets(
    weights: Float32, gram: Float32, missing: Float32, pool: Executor, factors: Float32 | None = None
) -> Float32:
    """W* [in, out] of ``weights`` [in, out].

    ``gram`` [in, in] is G, and ``missing`` [in, out], which is used up, is (W C)': how what the outputs lack goes with
    the inputs that these weights are multiplied with. ``factors`` [in] are AWQ's, by which those were divided.
    """
    if not mean_diagonal(gram, factors) > 0:
        return weights
    with damped(gram, _DAMPING, factors), factorized(gram, pool) as factor:

        def correct(outputs: slice) -> None:
            change = np.ascontiguousarray(missing[:, outputs])
            factor.solve(change)
            np.add(weights[:, outputs], change, out=missing[:, outputs])

        run_all(pool, correct, output_tiles(*weights.shape))
    return missing
