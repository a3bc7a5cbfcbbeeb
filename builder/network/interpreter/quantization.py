"""Quantize, dequantize and dynamic quantize. The caller rounds to the output's type, half to even and saturating.

Formulas: TensorRT's operator pages Quantize, Dequantize and DynamicQuantize, and "Quantization schemes"
(docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/quantized-types-schemes.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from builder.network.interpreter.values import DTYPE_NAMES, Array, round_to
from quantize.e8m0 import exponents_of, power_of_two

_LARGEST = {"fp8": 448.0, "fp4": 6.0}


def quantize(layer: Any, inputs: list[Array]) -> Array:
    """IQuantizeLayer: x / scale."""
    x, scale = _checked(inputs)
    blocks, spread = _spread(scale, x.shape, layer.axis)
    steps: Array = (x.reshape(blocks) / spread).reshape(x.shape)
    # A cast to integers cuts off; the layer rounds half to even and clamps to [-128, 127] or [-8, 7].
    return np.clip(np.rint(steps), -128, 127) if layer.to_type.name in ("INT8", "INT4") else steps


def dequantize(layer: Any, inputs: list[Array]) -> Array:
    """IDequantizeLayer: x * scale."""
    x, scale = _checked(inputs)
    blocks, spread = _spread(scale, x.shape, layer.axis)
    return np.asarray(x.reshape(blocks) * spread, np.float32).reshape(x.shape)


def dynamic_quantize(layer: Any, inputs: list[Array]) -> tuple[Array, Array]:
    """IDynamicQuantizeLayer: the blocks' own scales, and x / scale.

    A block's scale is its largest magnitude over the largest of the output type. e8m0 rounds it up to a power of two
    (docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/BlockScaling.html); fp8 rounds it, over the double
    quantization scale, to the nearest.
    """
    x = inputs[0]
    double_scale = inputs[1].reshape(()) if len(inputs) > 1 else np.float32(1)
    counts = [extent // block for extent, block in zip(x.shape, _block_shape(layer, x.shape), strict=True)]
    blocks = _split(x.shape, counts)
    parts = x.reshape(blocks)
    largest = np.abs(parts).max(tuple(range(1, len(blocks), 2)), keepdims=True)
    stored = _block_scales(layer, largest, double_scale)
    scales = stored * double_scale
    steps = np.divide(parts, scales, out=np.zeros_like(parts), where=scales != 0)
    return steps.reshape(x.shape), stored.reshape(counts)


def _block_scales(layer: Any, largest: Array, double_scale: Array | np.float32) -> Array:
    element_max, kind = _LARGEST[DTYPE_NAMES[layer.to_type.name]], DTYPE_NAMES[layer.scale_type.name]
    if kind == "e8m0":
        return np.asarray(power_of_two(exponents_of(largest, element_max, ceil=True)))
    return round_to(kind, largest / (np.float32(element_max) * double_scale))


def _block_shape(layer: Any, shape: tuple[int, ...]) -> list[int]:
    given = list(layer.block_shape)
    if not given:
        axis = layer.axis % len(shape)
        given = [layer.block_size if i == axis else 1 for i in range(len(shape))]
    blocks = [extent if block == -1 else block for block, extent in zip(given, shape, strict=True)]
    if any(extent % block for extent, block in zip(shape, blocks, strict=True)):
        raise ValueError(f"has blocks of {blocks}, which do not divide {list(shape)}")
    return blocks


def _checked(inputs: list[Array]) -> tuple[Array, Array]:
    if len(inputs) > 2 and inputs[2].any():
        raise ValueError("has a zero point that is not zero, which TensorRT does not allow")
    return inputs[0].astype(np.float32, copy=False), inputs[1].astype(np.float32, copy=False)


def _spread(scale: Array, shape: tuple[int, ...], axis: int) -> tuple[list[int], Array]:
    """A shape that splits ``shape`` into blocks, and the scale so shaped that it broadcasts over it."""
    if scale.size == 1:
        return list(shape), scale.reshape(())
    if scale.ndim == len(shape):
        if any(extent % count for extent, count in zip(shape, scale.shape, strict=True)):
            raise ValueError(f"has scales {list(scale.shape)}, which do not divide {list(shape)} into blocks")
        return _split(shape, scale.shape), scale.reshape([size for count in scale.shape for size in (count, 1)])
    if scale.ndim != 1 or not -len(shape) <= axis < len(shape) or scale.size != shape[axis]:
        raise ValueError(f"has scales {list(scale.shape)} on axis {axis} of {list(shape)}")
    return list(shape), scale.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])


def _split(shape: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [size for extent, count in zip(shape, counts, strict=True) for size in (count, extent // max(count, 1))]
