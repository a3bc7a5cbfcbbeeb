"""The compiled kernels as functions of NumPy arrays: what rounding.py and block_rounding.py define."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.dtypes import BFLOAT16, FLOAT8_E4M3
from quantize.native.library import native_library
from quantize.rounding import RoundedRows
from quantize.weight_rule import FP8_BLOCK

Array = npt.NDArray[Any]

_CODES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
_DOES_NOT_FIT, _OUT_OF_MEMORY = -2, -3


class DamagedRowError(ValueError):
    """A row of the source holds NaN or infinity."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} is not finite")
        self.row = row


@dataclass(frozen=True)
class Kernels:
    """All take source rows [rows, in] in one of ``dtypes`` and also return their squared norm.

    Raises DamagedRowError for NaN and infinity.
    """

    library: ctypes.CDLL

    @staticmethod
    def takes(dtype: np.dtype[Any]) -> bool:
        return dtype in _CODES

    def measure(self, source: Array) -> tuple[np.float32, float]:
        """Largest magnitude and squared norm."""
        largest = np.zeros(1, np.float32)
        sums = np.zeros(2)
        self._call("measure", source, largest, sums)
        return largest[0], float(sums[0])

    def fp8(self, source: Array, scale: np.float32 | None) -> tuple[RoundedRows, float]:
        """``scale`` of the whole tensor, which is not returned; None: one for each row."""
        values = np.empty(source.shape, np.uint8)
        scales = np.empty((len(source), 1), np.float32) if scale is None else None
        given = None if scale is None else np.array([scale], np.float32)
        sums = np.zeros(2)
        self._call("round_fp8", source, given, values, scales, sums)
        return _rounded(values.view(FLOAT8_E4M3), scales, sums)

    def fp8_band(self, source: Array) -> tuple[RoundedRows, float]:
        values, sums = np.empty(source.shape, np.uint8), np.zeros(2)
        scales = np.empty((1, -(-source.shape[1] // FP8_BLOCK)), np.float32)
        self._call("round_fp8_band", source, values, scales, sums)
        return _rounded(values.view(FLOAT8_E4M3), scales, sums)

    def int8(self, source: Array) -> tuple[RoundedRows, float]:
        values, sums = np.empty(source.shape, np.int8), np.zeros(2)
        scales = np.empty((len(source), 1), np.float32)
        self._call("round_int8", source, values, scales, sums)
        return _rounded(values, scales, sums)

    def int4(
        self,
        source: Array,
        group_size: int,
        *,
        symmetric: bool,
        factors: Sequence[float],
        smallest: np.float32,
        scale_dtype: npt.DTypeLike,
    ) -> tuple[RoundedRows, float] | None:
        """None when a scale, shrunk by ``smallest``, leaves the normal range of float16 that was asked for."""
        rows, columns = source.shape
        groups = (rows, columns // group_size)
        packed, scales = np.empty((rows, columns // 2), np.uint8), np.empty(groups, np.float32)
        zeros = None if symmetric else np.empty(groups, np.uint8)
        tried, sums = np.array(factors, np.float32), np.zeros(2)
        is_half = np.dtype(scale_dtype) == np.float16
        settings = (group_size, tried, len(tried), float(smallest), int(is_half))
        if not self._call("round_int4", source, *settings, packed, scales, zeros, sums):
            return None
        return RoundedRows(packed, scales.astype(scale_dtype), zeros, float(sums[1])), float(sums[0])

    def nvfp4(
        self, source: Array, tensor_scale: np.float32, neighbours: Sequence[int], *, fours: bool
    ) -> tuple[RoundedRows, float]:
        rows, columns = source.shape
        packed, codes = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 16), np.uint8)
        offsets, sums = np.array(neighbours, np.int32), np.zeros(2)
        settings = (float(tensor_scale), offsets, len(offsets), int(fours))
        self._call("round_nvfp4", source, *settings, packed, codes, sums)
        return _rounded(packed, codes.view(FLOAT8_E4M3), sums)

    def mxfp4(self, source: Array, ways: Sequence[bool]) -> tuple[RoundedRows, float]:
        rows, columns = source.shape
        packed, codes = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 32), np.uint8)
        tried, sums = np.array(ways, np.int32), np.zeros(2)
        self._call("round_mxfp4", source, tried, len(tried), packed, codes, sums)
        return _rounded(packed, codes, sums)

    def mxfp8(self, source: Array) -> tuple[RoundedRows, float]:
        rows, columns = source.shape
        values, codes, sums = np.empty(source.shape, np.uint8), np.empty((rows, columns // 32), np.uint8), np.zeros(2)
        self._call("round_mxfp8", source, values, codes, sums)
        return _rounded(values.view(FLOAT8_E4M3), codes, sums)

    def _call(self, name: str, source: Array, *arguments: Any) -> bool:
        """False: the scales do not fit."""
        source = np.ascontiguousarray(source)
        pointers = [argument.ctypes.data if isinstance(argument, np.ndarray) else argument for argument in arguments]
        num_rows, num_columns = source.shape
        result = getattr(self.library, name)(source.ctypes.data, _CODES[source.dtype], num_rows, num_columns, *pointers)
        if result >= 0:
            raise DamagedRowError(result)
        if result == _OUT_OF_MEMORY:
            raise MemoryError(f"{name} of a chunk of {num_rows} x {num_columns}")
        return bool(result != _DOES_NOT_FIT)


@cache
def native_kernels() -> Kernels | None:
    """None where there are none: see ``library``."""
    library = native_library()
    return None if library is None else Kernels(library)


def _rounded(values: Array, scales: Array | None, sums: npt.NDArray[np.float64]) -> tuple[RoundedRows, float]:
    return RoundedRows(values, scales, None, float(sums[1])), float(sums[0])
