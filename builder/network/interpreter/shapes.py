"""Layers that move or cut elements without computing: what they return has the values they were given."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.network.interpreter.values import Array, same_carrier


def identity(layer: Any, inputs: list[Array]) -> Array:
    """IIdentityLayer."""
    return inputs[0]


def shape(layer: Any, inputs: list[Array]) -> Array:
    """IShapeLayer: int64 [rank]."""
    return np.array(inputs[0].shape, np.int64)


def shuffle(layer: Any, inputs: list[Array]) -> Array:
    """IShuffleLayer: transpose, reshape, transpose; 0 in the sizes copies the input's where that is switched on."""
    x = inputs[0]
    x = x.transpose(list(layer.first_transpose)[: x.ndim])
    # With the sizes given as an input, reading reshape_dims would log an error.
    sizes = inputs[1].tolist() if len(inputs) > 1 else layer.reshape_dims
    if sizes is not None:
        keep = layer.zero_is_placeholder
        x = x.reshape([x.shape[i] if size == 0 and keep else size for i, size in enumerate(sizes)])
    return x.transpose(list(layer.second_transpose)[: x.ndim])


def squeeze(layer: Any, inputs: list[Array]) -> Array:
    """ISqueezeLayer: the named axes, or all that have one element."""
    return np.squeeze(inputs[0], _axes(inputs[1]) if len(inputs) > 1 else None)


def unsqueeze(layer: Any, inputs: list[Array]) -> Array:
    """IUnsqueezeLayer: axes are those of the output."""
    return np.expand_dims(inputs[0], _axes(inputs[1]))


def concatenation(layer: Any, inputs: list[Array]) -> Array:
    """IConcatenationLayer."""
    return np.concatenate(same_carrier(inputs), axis=layer.axis)


def slice_(layer: Any, inputs: list[Array | None]) -> Array:
    """ISliceLayer: start, size and stride of each axis (of some, where axes are named), fixed or given as inputs.

    Coordinates outside the input follow the layer's mode (TensorRT, SampleMode).
    """
    x, *dynamic = inputs
    if x is None:
        raise ValueError("has no input")
    dynamic += [None] * (5 - len(dynamic))
    starts, sizes, strides = (
        list(getattr(layer, name)) if given is None else given.tolist()
        for name, given in zip(("start", "shape", "stride"), dynamic[:3], strict=True)
    )
    axes = _slice_axes(layer, dynamic[4], x.ndim)
    for axis, start, size, stride in zip(axes, starts, sizes, strides, strict=True):
        x = _take(x, axis, start + stride * np.arange(size), layer.mode.name, dynamic[3])
    return x


def _slice_axes(layer: Any, given: Array | None, rank: int) -> list[int]:
    if given is not None:
        return [int(axis) % rank for axis in given]
    fixed = layer.axes
    return list(range(rank)) if fixed is None else [axis % rank for axis in fixed]


def _take(x: Array, axis: int, indices: Array, mode: str, fill: Array | None) -> Array:
    extent = x.shape[axis]
    outside = (indices < 0) | (indices >= extent)
    if not outside.any():
        return np.take(x, indices, axis=axis)
    if mode == "STRICT_BOUNDS":
        raise ValueError(f"reads {indices.min()}..{indices.max()} of axis {axis}, which has {extent} elements")
    if mode == "WRAP":
        return np.take(x, indices % extent, axis=axis)
    if mode == "CLAMP":
        return np.take(x, np.clip(indices, 0, extent - 1), axis=axis)
    if mode == "FILL":
        taken = np.take(x, np.where(outside, 0, indices), axis=axis)
        here = outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return np.where(here, np.asarray(0 if fill is None else fill, x.dtype), taken)
    raise ValueError(f"reads outside axis {axis} in mode {mode}, which the interpreter does not know")


def _axes(tensor: Array) -> tuple[int, ...]:
    return tuple(int(axis) for axis in tensor.reshape(-1))
