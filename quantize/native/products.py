"""The compiled kernels of products of bfloat16, as functions of NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from quantize.native.library import native_library

Float32 = npt.NDArray[np.float32]

PANEL = 16  # columns that are packed side by side


@dataclass(frozen=True)
class PackedTokens:
    """Inputs [num_tokens, size], rounded to bfloat16."""

    panels: npt.NDArray[np.uint32]  # [ceil(size / PANEL), ceil(num_tokens / 2), PANEL]
    size: int


@dataclass(frozen=True)
class ProductKernels:
    """Calls release the GIL."""

    library: ctypes.CDLL

    def pack(self, values: Float32) -> PackedTokens:
        """Of ``values`` [num_tokens, size]."""
        values = np.ascontiguousarray(values, np.float32)
        num_tokens, size = values.shape
        panels = np.empty((-(-size // PANEL), -(-num_tokens // 2), PANEL), np.uint32)
        self.library.pack_tokens(num_tokens, size, values.ctypes.data, size, panels.ctypes.data)
        return PackedTokens(panels, size)

    def add(
        self, total: Float32, left: PackedTokens, right: PackedTokens, rows: slice, columns: slice, *, upper: bool
    ) -> None:
        """Add ``left``'``right`` to these rows and columns of ``total``, which begin and end with panels or with it.

        ``upper``: what lies below the diagonal need not be right.
        """
        ends = [end for part in (rows, columns) for end in (part.start // PANEL, -(-part.stop // PANEL))]
        pointers = left.panels.ctypes.data, right.panels.ctypes.data
        stride = total.strides[0] // total.itemsize
        num_pairs = left.panels.shape[1]
        self.library.add_products(num_pairs, *pointers, *ends, int(upper), total.ctypes.data, stride, *total.shape)


@cache
def native_products() -> ProductKernels | None:
    """None where there are none, or the processor multiplies no bfloat16."""
    library = native_library()
    return ProductKernels(library) if library is not None and library.multiplies_bfloat16() else None
