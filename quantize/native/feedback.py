"""The compiled kernels of calibrated int4 as functions of NumPy arrays: what the modules of algorithms/ define."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.native.library import native_library

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FeedbackKernels:
    """Matrices are [in, out] with contiguous rows; calls release the GIL."""

    library: ctypes.CDLL

    def round_block(
        self,
        target: Float32,
        weights: Float32,
        feedback: Float32,
        scales: Float32,
        zeros: Float32,
        groups: npt.NDArray[np.int32],
        values: npt.NDArray[np.uint8],
        errors: Float32,
    ) -> None:
        """See block_feedback.round_block."""
        rows = np.ascontiguousarray(groups, np.int32)
        matrices = (*_matrices(target, weights, feedback, scales, zeros), rows.ctypes.data)
        self._call("round_block", target, *matrices, *_matrices(values, errors))

    def descend_block(
        self,
        gradient: Float32,
        errors: Float32,
        weights: Float32,
        within: Float32,
        scales: Float32,
        zeros: Float32,
        groups: npt.NDArray[np.int32],
        values: npt.NDArray[np.uint8],
    ) -> None:
        """See block_feedback.descend_block."""
        rows = np.ascontiguousarray(groups, np.int32)
        matrices = (*_matrices(gradient, errors, weights, within, scales, zeros), rows.ctypes.data)
        self._call("descend_block", gradient, *matrices, *_matrices(values))

    def times_steps(self, within: Float32, values: npt.NDArray[np.uint8], zeros: Float32) -> Float32:
        """See block_feedback.times_steps. ``zeros`` [out] is contiguous."""
        products = np.empty(values.shape, np.float32)
        self._call("times_steps", products, *_matrices(within, values, products), zeros.ctypes.data)
        return products

    def fit_scales(
        self,
        gradient: Float32,
        of_steps: Float32,
        weights: Float32,
        values: npt.NDArray[np.uint8],
        errors: Float32,
        scales: Float32,
        first: Float32,
        zeros: Float32,
        most: float,
        *,
        half: bool,
    ) -> None:
        """See block_feedback.fit_scales. ``scales``, ``first`` and ``zeros`` [out] are contiguous."""
        vectors = [array.ctypes.data for array in (scales, first, zeros)]
        matrices = _matrices(gradient, of_steps, weights, values, errors)
        self._call("fit_scales", gradient, *matrices, *vectors, most, int(half))

    def search_scales(
        self, block: Float32, moments: Float32, base: Float32, zeros: Float32, factors: Sequence[float], *, half: bool
    ) -> Float32:
        """Of ``base`` [out] times each of ``factors`` the scales of the least error of ``block`` [n, out]."""
        best, tried = np.empty(block.shape[1], np.float32), np.array(factors, np.float32)
        vectors = [np.ascontiguousarray(array, np.float32) for array in (moments, base, zeros)]
        pointers = [array.ctypes.data for array in (*vectors, tried)]
        self._call("search_scales", block, *_matrices(block), *pointers, len(tried), int(half), best.ctypes.data)
        return best

    def _call(self, name: str, shaped: Array, *arguments: float) -> None:
        if getattr(self.library, name)(*shaped.shape, *arguments) != -1:
            raise MemoryError(f"{name} of a block of {shaped.shape[0]} x {shaped.shape[1]}")


def _matrices(*arrays: Array) -> list[int]:
    """Of each its first value, and how many values its rows lie apart. Raises ValueError where values of a row do."""
    if any(array.strides[1] != array.itemsize and array.shape[1] > 1 for array in arrays):
        raise ValueError("the kernels take matrices whose rows are contiguous")
    return [number for array in arrays for number in (array.ctypes.data, array.strides[0] // array.itemsize)]


@cache
def native_feedback() -> FeedbackKernels | None:
    """None where there are none: see ``library``."""
    library = native_library()
    return None if library is None else FeedbackKernels(library)
