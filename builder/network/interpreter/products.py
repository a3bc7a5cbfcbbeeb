"""Matrix products, summed in float32. The caller rounds what they return."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.network.interpreter.values import Array


def matrix_multiply(layer: Any, inputs: list[Array]) -> Array:
    """IMatrixMultiplyLayer: leading dimensions broadcast; a VECTOR operand has no row or column of its own."""
    a, b = inputs
    operations = layer.op0.name, layer.op1.name
    if operations[0] == "VECTOR":
        a = a[..., None, :]
    elif operations[0] == "TRANSPOSE":
        a = a.swapaxes(-1, -2)
    if operations[1] == "VECTOR":
        b = b[..., :, None]
    elif operations[1] == "TRANSPOSE":
        b = b.swapaxes(-1, -2)
    product: Array = np.matmul(a, b)
    product = product[..., 0] if operations[1] == "VECTOR" else product
    return product[..., 0] if operations == ("VECTOR", "VECTOR") else _drop_row(product, operations)


def _drop_row(product: Array, operations: tuple[str, str]) -> Array:
    return product[..., 0, :] if operations[0] == "VECTOR" else product


def einsum(layer: Any, inputs: list[Array]) -> Array:
    """IEinsumLayer; the equation is NumPy's."""
    return np.asarray(np.einsum(layer.equation, *inputs, optimize=True))
