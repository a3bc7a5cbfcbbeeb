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

    panels: npt.NDArray[np.uint32]  # [ceil(size / PANEL), ceil(num_tokens / 2), PANEL]; panels may lie apart


@dataclass(frozen=True)
class ProductKernels:
    """Calls release the GIL."""

    library: ctypes.CDLL

    def pack(self, values: Float32) -> PackedTokens:
        """Of ``values`` [num_tokens, size]."""
        num_tokens, size = values.shape
        panels = np.empty((-(-size // PANEL), -(-num_tokens // 2), PANEL), np.uint32)
        self._pack(values, panels, 0)
        return PackedTokens(panels)

    def replace(self, packed: PackedTokens, begin: int, values: Float32) -> None:
        """Tokens from ``begin``, an even number, on; an even number of them, or up to the last."""
        self._pack(values, packed.panels, begin // 2)

    def rest(self, packed: PackedTokens, begin: int) -> PackedTokens:
        """A view of the tokens from ``begin``, an even number, on."""
        return PackedTokens(packed.panels[:, begin // 2 :])

    def _pack(self, values: Float32, panels: npt.NDArray[np.uint32], first_pair: int) -> None:
        if values.dtype != np.float32 or values.strides[1] != values.itemsize:
            values = np.ascontiguousarray(values, np.float32)
        source, stride = values.ctypes.data, values.strides[0] // values.itemsize
        place = panels[0, first_pair:].ctypes.data if len(panels) else panels.ctypes.data
        self.library.pack_tokens(*values.shape, source, stride, place, panels.shape[1])

    def add(
        self, total: Float32, left: PackedTokens, right: PackedTokens, rows: slice, columns: slice, *, upper: bool
    ) -> None:
        """Add ``left``'``right`` to these rows and columns of ``total``, which begin and end with panels or with it.

        ``upper``: what lies below the diagonal need not be right.
        """
        ends = [end for part in (rows, columns) for end in (part.start // PANEL, -(-part.stop // PANEL))]
        factors = (number for each in (left, right) for number in (each.panels.ctypes.data, _panel_stride(each)))
        stride = total.strides[0] // total.itemsize
        num_pairs = left.panels.shape[1]
        self.library.add_products(num_pairs, *factors, *ends, int(upper), total.ctypes.data, stride, *total.shape)


def _panel_stride(packed: PackedTokens) -> int:
    """Values from panel to panel."""
    return packed.panels.strides[0] // packed.panels.itemsize


@cache
def native_products() -> ProductKernels | None:
    """None where there are none, or the processor multiplies no bfloat16."""
    library = native_library()
    return ProductKernels(library) if library is not None and library.multiplies_bfloat16() else None
