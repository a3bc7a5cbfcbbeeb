"""Second moments of a linear's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantize.algorithms.symmetric import mirror
from quantize.calibration.products import Products
from quantize.tiles import output_tiles, run_all

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Exact:
    """What the unquantized model has where ``Gram`` is shown the quantized one's inputs: one of the two is enough."""

    inputs: Sequence[Float32] = ()  # [num_tokens, in]
    outputs: Sequence[Float32] = ()  # [num_tokens, out] of the linear, without its bias


class Gram:
    """X'X of all inputs X [num_tokens, in] that were added, and how far they are from those of the unquantized model.

    The squared error of the outputs that a change dW of the weights causes is tr(dW X'X dW'), exactly and whatever
    the number of tokens was. ``full`` False keeps the diagonal alone. Once a result was asked for, nothing is added.
    """

    def __init__(self, size: int, products: Products, *, full: bool = True) -> None:
        self.num_tokens = 0
        self._products, self._pool = products, products.pool
        self._squares = np.zeros(0 if full else size, np.float64)
        # float32: at 14336 columns this is 0.8 GB, and its rounding is far below the damping of GPTQ.
        self._sum: Float32 | None = np.zeros((size, size), np.float32) if full else None
        self._is_mean = self._is_drift = False
        self._of_inputs: Float32 | None = None  # X_exact'X
        self._of_outputs: Float32 | None = None  # X'Y_exact

    def add(self, inputs: Sequence[Float32], exact: Exact | None = None) -> None:
        """``inputs``: arrays [num_tokens, in]; ``exact``: as many, of the same tokens."""
        self.num_tokens += sum(len(part) for part in inputs)
        if self._sum is None:
            self._squares += sum(self._pool.map(_squares, inputs))
            return
        factors = self._products.of(inputs)
        factors.add_gram(self._sum)
        size = len(self._sum)
        if exact is not None and exact.outputs:
            if self._of_outputs is None:
                self._of_outputs = np.zeros((size, exact.outputs[0].shape[1]), np.float32)
            factors.add_cross(self._of_outputs, self._products.of(exact.outputs))
        elif exact is not None:
            if self._of_inputs is None:
                self._of_inputs = np.zeros((size, size), np.float32)
            self._products.of(exact.inputs).add_cross(self._of_inputs, factors)

    @property
    def nbytes(self) -> int:
        """Of X'X, or of its diagonal."""
        return (self._squares if self._sum is None else self._sum).nbytes

    @property
    def mean_square(self) -> Float32:
        """E[x^2] of each column: [in]"""
        squares = self._squares if self._sum is None else np.diagonal(self._sum)
        return np.asarray(squares if self._is_mean else squares * self._scale, np.float32)

    def matrix(self) -> Float32:
        """E[x x'], [in, in]. Raises ValueError when only the diagonal was kept."""
        if self._sum is None:
            raise ValueError("this Gram matrix was kept as its diagonal")
        if not self._is_mean:
            mirror(self._sum, self._pool, self._scale)
            self._is_mean = True
        return self._sum

    def missing(self, weights: Float32, factors: Float32 | None = None) -> Float32 | None:
        """E[x y'] [in, out], y being what the outputs of ``weights`` [in, out] lack as their inputs are not exact.

        ``factors`` [in]: by which the inputs were divided and the weights multiplied. None where nothing exact
        was given.
        """
        matrix = self.matrix()
        if self._of_outputs is not None:
            # In place: outputs are those of one linear, which asks once, and wide layers have the least room here.
            lacking, self._of_outputs = self._of_outputs, None

            def subtract(part: slice) -> None:
                lacking[:, part] *= self._scale
                lacking[:, part] -= matrix @ weights[:, part]

            run_all(self._pool, subtract, output_tiles(*weights.shape))
            return lacking
        found = np.empty_like(weights)
        drift = self._drift(matrix, factors)
        if drift is None:
            return None
        run_all(
            self._pool, lambda part: np.copyto(found[:, part], drift.T @ weights[:, part]), output_tiles(*weights.shape)
        )
        return found

    def _drift(self, matrix: Float32, factors: Float32 | None) -> Float32 | None:
        """E[(x_exact - x) x'], in place: linears of one input but different rules ask for it in turn."""
        if self._of_inputs is not None and not self._is_drift:
            self._of_inputs *= self._scale if factors is None else (self._scale / factors)[:, None]
            self._of_inputs -= matrix
            self._is_drift = True
        return self._of_inputs

    @property
    def _scale(self) -> np.float32:
        return np.float32(1 / max(self.num_tokens, 1))


def _squares(inputs: Float32) -> npt.NDArray[np.float64]:
    return np.asarray(np.einsum("ti,ti->i", inputs, inputs), np.float64)
