"""Weights as OpenVINO constants, in the shapes that the CPU plugin recognizes and keeps compressed in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from builder.targets.cpu.requantize import int8_per_channel
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from openvino import Node

    from quantize import QuantizedTensor

REQUANTIZED = ("fp8", "nvfp4", "mxfp4", "mxfp8")  # no kernel multiplies them; decompressed they take 4 bytes a weight


def weight_node(weight: QuantizedTensor, name: str, *, keep_float32: bool) -> Node:
    """A float32 node [out_features, in_features] of ``weight``; the constant within carries its ``name``."""
    if weight.scheme == "int4":
        return _int4(weight, name)
    if weight.scheme == "int8":
        return _int8(weight.values, _scales(weight, name), name)
    if weight.scheme in REQUANTIZED:
        return _int8(*int8_per_channel(weight.dequantize()), name)
    return _float(weight.values, name, keep_float32=keep_float32)


def stored_as(scheme: str, keep_float32: bool) -> str:
    """What becomes of weights of ``scheme``, for the manifest."""
    if scheme in REQUANTIZED:
        return "requantized to int8 per channel"
    if scheme == "none":
        return "float32" if keep_float32 else "float16"
    return "as in the checkpoint"


def _float(values: npt.NDArray[Any], name: str, *, keep_float32: bool) -> Node:
    """Float weights: stored as float32 or float16, float32 to the graph."""
    from openvino import opset15 as op

    if values.dtype != np.float16 or keep_float32:
        values = values.astype(np.float32)
        # bfloat16 reaches further than float16: such a weight is stored in full.
        if keep_float32 or np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            return named(np.ascontiguousarray(values), name)
    return op.convert(named(values.astype(np.float16), name), "f32")


def named(values: object, name: str) -> Node:
    """A constant of an array or ``ov.Tensor``. It owns a copy: shared memory of a file map crashes the serializer."""
    from openvino import opset15 as op

    constant = op.constant(values, shared_memory=False)
    constant.set_friendly_name(name)
    return constant


def _int4(weight: QuantizedTensor, name: str) -> Node:
    """u4 -> Convert -> Subtract -> Multiply -> Reshape -> Convert: the one pattern that stays four bits wide."""
    from openvino import Shape, Tensor, Type
    from openvino import opset15 as op

    rows, columns = weight.shape
    scales = np.ascontiguousarray(_scales(weight, name))
    groups = scales.shape[1]
    packed = Tensor(np.ascontiguousarray(weight.values), Shape([rows, groups, columns // groups]), Type.u4)
    # Scales are float32 only where float16 cannot hold them; the arithmetic then follows.
    dtype = "f32" if scales.dtype == np.float32 else "f16"
    centred = op.subtract(op.convert(named(packed, name), dtype), op.convert(_zero_points(weight, name), dtype))
    scaled = op.multiply(centred, named(scales[:, :, None], name + "_scale"))
    return op.convert(op.reshape(scaled, np.array([rows, columns], np.int64), False), "f32")


def _scales(weight: QuantizedTensor, name: str) -> npt.NDArray[Any]:
    if weight.scales is None:
        raise BuildError(f"{name}: a weight of scheme {weight.scheme} has no scales; quantize the checkpoint again")
    return weight.scales


def _zero_points(weight: QuantizedTensor, name: str) -> Node:
    from openvino import Shape, Tensor, Type

    if weight.zero_points is None:
        return named(Tensor(np.array([8], np.uint8), Shape([1, 1, 1]), Type.u4), name + "_zero_point")
    flat = weight.zero_points.reshape(-1)
    padded = np.pad(flat, (0, flat.size % 2))
    packed = padded[0::2] | (padded[1::2] << 4)
    shape = Shape([*weight.zero_points.shape, 1])
    return named(Tensor(np.ascontiguousarray(packed), shape, Type.u4), name + "_zero_point")


def _int8(values: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], name: str) -> Node:
    from openvino import opset15 as op

    converted = op.convert(named(np.ascontiguousarray(values), name), "f32")
    return op.multiply(converted, named(np.ascontiguousarray(scales, np.float32), name + "_scale"))
