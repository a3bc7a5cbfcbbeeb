"""Layers that read or write by index. Values are moved, not computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.network.interpreter.values import Array


def gather(layer: Any, inputs: list[Array]) -> Array:
    """IGatherLayer in its three modes (ONNX Gather, GatherElements, GatherND)."""
    data, indices = inputs
    mode, batch_dims = layer.mode.name, layer.num_elementwise_dims
    if mode == "ND":
        _check_nd(data, indices, batch_dims)
        return data[_nd_index(indices, batch_dims)]
    axis = layer.axis % data.ndim
    _check(indices, data.shape[axis])
    if mode == "ELEMENT":
        return np.take_along_axis(data, _int64(indices), axis)
    if batch_dims:
        parts = [np.take(part, rows, axis=axis - 1) for part, rows in zip(data, indices, strict=True)]
        return np.stack(parts)
    return np.take(data, indices, axis=axis)


def scatter(layer: Any, inputs: list[Array]) -> Array:
    """IScatterLayer: a copy of the data with updates at the indices (ONNX ScatterElements, ScatterND).

    Where indices repeat TensorRT leaves open which update stays; here it is the last.
    """
    data, indices, updates = inputs
    out = data.copy()
    if layer.mode.name == "ND":
        _check_nd(data, indices, 0)
        out[_nd_index(indices, 0)] = updates.astype(out.dtype, copy=False)
    else:
        axis = layer.axis % data.ndim
        _check(indices, data.shape[axis])
        np.put_along_axis(out, _int64(indices), updates.astype(out.dtype, copy=False), axis)
    return out


def one_hot(layer: Any, inputs: list[Array]) -> Array:
    """IOneHotLayer: ``values`` are (cold, hot); the new axis has ``depth`` elements."""
    indices, values, depth = inputs
    axis = layer.axis % (indices.ndim + 1)
    classes = np.arange(int(depth)).reshape([-1 if i == axis else 1 for i in range(indices.ndim + 1)])
    return np.where(np.expand_dims(indices, axis) == classes, values[1], values[0])


def non_zero(layer: Any, inputs: list[Array]) -> Array:
    """INonZeroLayer: coordinates [rank, how many]."""
    return np.stack(np.nonzero(inputs[0]))


def _nd_index(indices: Array, batch_dims: int) -> tuple[Array, ...]:
    leading = np.indices(indices.shape[:-1], sparse=True)[:batch_dims]
    return (*leading, *np.moveaxis(_int64(indices), -1, 0))


def _int64(indices: Array) -> Array:
    return indices.astype(np.int64, copy=False)


def _check_nd(data: Array, indices: Array, batch_dims: int) -> None:
    for column, extent in enumerate(data.shape[batch_dims : batch_dims + indices.shape[-1]]):
        _check(indices[..., column], extent)


def _check(indices: Array, extent: int) -> None:
    # On a GPU such an index reads foreign memory, or zeros; here it must not pass for a Python index from the end.
    if indices.size and (indices.min() < 0 or indices.max() >= extent):
        raise ValueError(f"has indices {indices.min()}..{indices.max()} into an axis of {extent} elements")
