"""Compiled casts between 16-bit floats, as functions of NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.native.library import native_library


@dataclass(frozen=True)
class CastKernels:
    """Calls release the GIL."""

    library: ctypes.CDLL

    def float16_of_bfloat16(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float16] | None:
        """Rounded to the nearest even; None where one of them is not finite in float16."""
        source = np.ascontiguousarray(values)
        halves = np.empty(source.shape, np.float16)
        done = self.library.cast_halves(source.size, source.ctypes.data, halves.ctypes.data)
        return halves if done == -1 else None


@cache
def native_casts() -> CastKernels | None:
    """None where there are none, or the processor has no such instructions."""
    library = native_library()
    return CastKernels(library) if library is not None and library.casts_halves() else None
