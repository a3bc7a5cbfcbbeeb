"""The int4 grid of a weight matrix: a scale and a zero point for every group.

Everything here is transposed, [in, out]: a group is then a block of rows, its outputs are NumPy's long inner loop, and
a column of the weight matrix is contiguous, as GPTQ wants it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.rounding import int4_range, usable_scales

Float32 = npt.NDArray[np.float32]
Values = npt.NDArray[np.uint8]

# Shrinking the range by the last of them is already too much for nearly every group.
FACTORS = tuple(float(factor) for factor in np.linspace(1.0, 0.62, 20).round(4))
_FLOAT16 = np.finfo(np.float16)


@dataclass(frozen=True)
class Grid:
    """Of a matrix [in, out] in groups along ``in``: W = (q - z) * s with q in 0..15."""

    scales: Float32  # [num_groups, out], already rounded to ``dtype``
    zeros: Float32  # [num_groups, out], whole numbers 0..15
    dtype: np.dtype[Any]  # float16, or float32 where a scale leaves its normal range

    def columns(self, begin: int, end: int) -> Grid:
        """The grid of some of the outputs."""
        return Grid(self.scales[:, begin:end], self.zeros[:, begin:end], self.dtype)


def range_grid(weights: Float32, group_size: int, *, symmetric: bool, dtype: np.dtype[Any] | None = None) -> Grid:
    """The whole range of each group of ``weights`` [in, out], zero included: nothing is clipped.

    ``dtype`` None: float16 where all scales, shrunk by the search as well, are normal numbers of it.
    """
    groups = weights.reshape(-1, group_size, weights.shape[1])
    base, zeros = int4_range(groups, 1, symmetric=symmetric)
    if dtype is None:
        fits = base.min() * FACTORS[-1] >= _FLOAT16.tiny and base.max() <= _FLOAT16.max
        dtype = np.dtype(np.float16 if fits else np.float32)
    return Grid(stored(base, dtype), zeros, dtype)


def stored(scales: Float32, dtype: np.dtype[Any]) -> Float32:
    """Rounded to the type that is stored, so that values are rounded against what a reader will see."""
    return usable_scales(scales.astype(dtype).astype(np.float32))


def encode(weights: Float32, grid: Grid) -> Values:
    """Nearest values 0..15 of ``weights`` [in, out]: [in, out]."""
    values = np.empty(weights.shape, np.uint8)
    size = len(weights) // len(grid.scales)
    # Group by group: a whole matrix of floats would take as much memory as the weights do.
    for group, (scales, zeros) in enumerate(zip(grid.scales, grid.zeros, strict=True)):
        rows = slice(group * size, (group + 1) * size)
        steps = weights[rows] / scales
        np.rint(steps, out=steps)
        steps += zeros
        values[rows] = np.clip(steps, 0, 15, out=steps)
    return values


def decode(values: Values, grid: Grid) -> Float32:
    """Values 0..15 [in, out] back to weights [in, out]."""
    num_groups, out = grid.scales.shape
    weights = np.subtract(values.reshape(num_groups, -1, out), grid.zeros[:, None], dtype=np.float32)
    weights *= grid.scales[:, None]
    return weights.reshape(values.shape)
