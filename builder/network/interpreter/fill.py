"""Layers that make tensors from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.network.interpreter.values import Array


def fill(layer: Any, inputs: list[Array | None]) -> Array:
    """IFillLayer LINSPACE: start + the sum over axes of step * index. Random fills are refused: they cannot be held
    against anything."""
    if layer.operation.name != "LINSPACE":
        raise ValueError(f"fills by {layer.operation.name}; the interpreter knows LINSPACE")
    sizes, start, steps = inputs + [None] * (3 - len(inputs))
    extents = list(layer.shape) if sizes is None else sizes.tolist()
    first = layer.alpha if start is None else start
    step = np.reshape(layer.beta if steps is None else steps, -1)
    out = np.asarray(first)
    for axis, extent in enumerate(extents):
        along = np.arange(extent) * step[axis if len(step) > 1 else 0]
        out = out + along.reshape([-1 if i == axis else 1 for i in range(len(extents))])
    return np.broadcast_to(out, extents)
