"""What factors of matrix products are rounded to; sums are float32."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quantize.native.products import native_products

Float32 = npt.NDArray[np.float32]
F = TypeVar("F")


class Arithmetic(Protocol[F]):
    """Products X'Y of X [num_tokens, rows] and Y [num_tokens, columns], from factors as it wants them."""

    def pack(self, values: Float32) -> F:
        """A factor [num_tokens, size]. It may be a view."""
        ...

    def replace(self, packed: F, begin: int, values: Float32) -> None:
        """Tokens of a factor from ``begin``, an even number, on; an even number of them, or up to the last."""
        ...

    def rest(self, packed: F, begin: int) -> F:
        """A view of the tokens from ``begin``, an even number, on."""
        ...

    def add(self, total: Float32, left: F, right: F, rows: slice, columns: slice, *, upper: bool) -> None:
        """Add these rows and columns, which begin at multiples of 16, to ``total`` [rows, columns].

        ``upper``: what lies below the diagonal need not be right.
        """
        ...


class Float32Arithmetic:
    """With NumPy."""

    def pack(self, values: Float32) -> Float32:
        return values

    def replace(self, packed: Float32, begin: int, values: Float32) -> None:
        packed[begin : begin + len(values)] = values

    def rest(self, packed: Float32, begin: int) -> Float32:
        return packed[begin:]

    def add(self, total: Float32, left: Float32, right: Float32, rows: slice, columns: slice, *, upper: bool) -> None:
        """NumPy itself sees that both factors of a tile on the diagonal are one, and computes a half."""
        total[rows, columns] += left[:, rows].T @ right[:, columns]


def arithmetic_of(*, bfloat16: bool) -> Arithmetic[Any]:
    """bfloat16 counts where the native kernels have it: there linears round their inputs to it as well."""
    kernels = native_products() if bfloat16 else None
    return Float32Arithmetic() if kernels is None else kernels


def product(arithmetic: Arithmetic[F], left: F, right: F, shape: tuple[int, ...]) -> Float32:
    """``left``'``right``, of this ``shape``, [rows, columns]."""
    total = np.zeros(shape, np.float32)
    arithmetic.add(total, left, right, slice(0, shape[0]), slice(0, shape[1]), upper=False)
    return total
