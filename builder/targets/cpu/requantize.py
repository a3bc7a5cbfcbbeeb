"""Weights of 8-bit and 4-bit floats: no CPU kernel multiplies them, and decompressed they cost four bytes each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def int8_per_channel(weights: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Symmetric int8 values [out, in] in -127..127 and scales [out, 1], rounded to nearest."""
    scales = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(weights / scales).astype(np.int8), scales
