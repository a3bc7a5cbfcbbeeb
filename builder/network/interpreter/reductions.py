"""Layers that combine the elements of an axis. Inputs are float32 or integers; the caller rounds what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from builder.network.interpreter.values import Array

_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "SUM": np.sum,
    "PROD": np.prod,
    "MAX": np.max,
    "MIN": np.min,
    "AVG": np.mean,
}


def axes_of(mask: int, rank: int) -> tuple[int, ...]:
    """TensorRT's bit mask of axes: bit i is axis i."""
    return tuple(axis for axis in range(rank) if mask >> axis & 1)


def reduce(layer: Any, inputs: list[Array]) -> Array:
    """IReduceLayer."""
    (x,) = inputs
    return np.asarray(_REDUCTIONS[layer.op.name](x, axis=axes_of(layer.axes, x.ndim), keepdims=layer.keep_dims))


def softmax_over(x: Array, axis: int | tuple[int, ...]) -> Array:
    exponentials = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis, keepdims=True))


def softmax(layer: Any, inputs: list[Array]) -> Array:
    """ISoftMaxLayer."""
    (x,) = inputs
    return softmax_over(x, axes_of(layer.axes, x.ndim))


def cumulative(layer: Any, inputs: list[Array]) -> Array:
    """ICumulativeLayer: sums along an axis, each with or without its own element, from either end."""
    x, axis_tensor = inputs
    axis = int(axis_tensor)
    flipped = np.flip(x, axis) if layer.reverse else x
    sums = np.cumsum(flipped, axis=axis, dtype=x.dtype)
    sums = sums - flipped if layer.exclusive else sums
    return np.flip(sums, axis) if layer.reverse else sums


def normalization(layer: Any, inputs: list[Array]) -> Array:
    """INormalizationLayer over the masked axes: (x - mean) / sqrt(variance + epsilon) * scale + bias."""
    x, scale, bias = inputs
    if layer.num_groups != 1:
        raise ValueError(f"has {layer.num_groups} groups; the interpreter knows 1")
    axes = axes_of(layer.axes, x.ndim)
    centred = x - x.mean(axes, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axes, keepdims=True) + layer.epsilon) * scale + bias)


def top_k(layer: Any, inputs: list[Array]) -> tuple[Array, Array]:
    """ITopKLayer: values, best first, and their indices. Which of equal values comes first TensorRT leaves open."""
    x = inputs[0]
    k = int(inputs[1]) if len(inputs) > 1 else layer.k
    (axis,) = axes_of(layer.axes, x.ndim)
    order = np.argsort(-x if layer.op.name == "MAX" else x, axis=axis, kind="stable")
    indices = np.take(order, np.arange(k), axis=axis)
    return np.take_along_axis(x, indices, axis=axis), indices
