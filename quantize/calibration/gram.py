"""Second moments of a linear's inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Gram:
    """X'X of all inputs X [num_tokens, in] that were added, and how far they are from those of the unquantized model.

    The squared error of the outputs that a change dW of the weights causes is tr(dW X'X dW'), exactly and whatever
    the number of tokens was. ``full`` False keeps the diagonal alone.
    """

    is_compared = True

    def __init__(self, size: int, *, full: bool = True) -> None:
        self.num_tokens = 0
        self._squares = np.zeros(size, np.float64)
        # float32: at 14336 columns this is 0.8 GB, and its rounding is far below the damping of GPTQ.
        self._sum: Float32 | None = np.zeros((size, size), np.float32) if full else None
        self._drift: Float32 | None = None

    def add(self, inputs: Float32, exact: Float32 | None = None) -> None:
        """``inputs`` [num_tokens, in]; ``exact``, of the same shape, are what the unquantized model has there."""
        self.num_tokens += len(inputs)
        self._squares += np.einsum("ti,ti->i", inputs, inputs)
        if self._sum is not None:
            self._sum += inputs.T @ inputs
            if exact is not None:
                self._drift = (exact - inputs).T @ inputs + (0 if self._drift is None else self._drift)

    @property
    def mean_square(self) -> Float32:
        """E[x^2] of each column: [in]"""
        return (self._squares / max(self.num_tokens, 1)).astype(np.float32)

    def matrix(self) -> Float32:
        """E[x x'], [in, in]. Raises ValueError when only the diagonal was kept."""
        if self._sum is None:
            raise ValueError("this Gram matrix was kept as its diagonal")
        return self._sum / np.float32(max(self.num_tokens, 1))

    def drift(self) -> Float32 | None:
        """E[(x_exact - x) x'], [in, in]; None when the exact inputs were not given."""
        return None if self._drift is None else self._drift / np.float32(max(self.num_tokens, 1))
