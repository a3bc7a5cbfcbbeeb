"""Stored matrices as nodes of the network's dtype: a constant of the stored bits, its scales and a DequantizeLinear.

What dequantizes to what is TensorRT's operator reference, "Dequantize": blocks along the last axis, one scale each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.payload import Deferred, ElementType, Payload, float_payload, raw_payload
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import QuantizedTensor

Place = Callable[[str, Payload], Tensor]
"""Makes a named tensor of a payload."""

_BLOCK = 128  # rows and columns of an fp8 block


def dequantized(graph: Graph, place: Place, name: str, weight: QuantizedTensor) -> Tensor:
    """A tensor [out, in] of a weight with scales. Raises BuildError for what the network's dtype cannot hold."""
    return _BY_SCHEME[weight.scheme](graph, place, name, weight)


def _int4(graph: Graph, place: Place, name: str, weight: QuantizedTensor) -> Tensor:
    """Stored unsigned with the zero point 8, or one of each group; TensorRT's values are signed and have no zero
    points, so the distance of a zero point from 8 is taken off after the scale.
    """
    stored = weight.values
    signed = Deferred("int4", weight.shape, stored, lambda: np.bitwise_xor(stored, np.uint8(0x88)))
    values = place(name, signed)
    scales = _scales(weight)
    tensor = graph.dequantize(values, place(f"{name}:scale", _scale_payload(graph, scales, name)))
    if weight.zero_points is None:
        return tensor
    zeros = (weight.zero_points.astype(np.float32) - np.float32(8)) * scales.astype(np.float32)
    offset = place(f"{name}:zero", float_payload(zeros[..., None], graph.dtype, name))
    rows, groups = scales.shape
    by_group = graph.subtract(graph.shuffle(tensor, (rows, groups, -1)), offset)
    return graph.shuffle(by_group, weight.shape)


def _eight_bits(graph: Graph, place: Place, name: str, weight: QuantizedTensor) -> Tensor:
    """int8 and fp8: a scale of each row, of the whole tensor, or of 128 x 128 blocks. The scales stay float32."""
    dtype: ElementType = "int8" if weight.scheme == "int8" else "fp8"
    values = place(name, raw_payload(dtype, weight.values))
    scales = _scales(weight)
    rows, columns = weight.shape
    if scales.size == 1:  # of the tensor, or of its only block: TensorRT takes no shape [1, 1]
        return graph.dequantize(values, _float32(place, name, scales.reshape(())))
    if scales.shape == (rows, 1):
        return graph.dequantize(values, _float32(place, name, scales[:, 0]), axis=0)
    block = (gcd(rows, _BLOCK), gcd(columns, _BLOCK))
    spread = np.repeat(np.repeat(scales, _BLOCK // block[0], 0), _BLOCK // block[1], 1)
    spread = spread[: rows // block[0], : columns // block[1]]
    scale = place(f"{name}:scale", float_payload(spread, graph.dtype, name))
    return graph.dequantize(values, scale, block_shape=block)


def _nvfp4(graph: Graph, place: Place, name: str, weight: QuantizedTensor) -> Tensor:
    """e2m1 in blocks of 16 with e4m3 scales, which have a scale of the tensor."""
    if weight.tensor_scale is None:
        raise BuildError(f"{name} is nvfp4 without the scale of its tensor; quantize the model again")
    values = place(name, raw_payload("fp4", weight.values, weight.shape))
    blocks = place(f"{name}:scale", raw_payload("fp8", _scales(weight)))
    whole = place(f"{name}:scale_2", float_payload(np.asarray(weight.tensor_scale), "float32", name))
    return graph.dequantize(values, graph.cast(graph.dequantize(blocks, whole, dtype="float32")))


def _mx(graph: Graph, place: Place, name: str, weight: QuantizedTensor) -> Tensor:
    """mxfp4 and mxfp8: blocks of 32 that share a power of two (OCP Microscaling Formats 1.0)."""
    four_bits = weight.scheme == "mxfp4"
    values = raw_payload("fp4" if four_bits else "fp8", weight.values, weight.shape)
    scales = place(f"{name}:scale", raw_payload("e8m0", _scales(weight)))
    return graph.dequantize(place(name, values), scales)


_BY_SCHEME: dict[str, Callable[[Graph, Place, str, QuantizedTensor], Tensor]] = {
    "int4": _int4,
    "int8": _eight_bits,
    "fp8": _eight_bits,
    "nvfp4": _nvfp4,
    "mxfp4": _mx,
    "mxfp8": _mx,
}


def _scales(weight: QuantizedTensor) -> npt.NDArray[Any]:
    if weight.scales is None:
        raise BuildError(f"a weight of the scheme {weight.scheme} has no scales; quantize the model again")
    return weight.scales


def _float32(place: Place, name: str, scales: npt.NDArray[Any]) -> Tensor:
    return place(f"{name}:scale", float_payload(np.asarray(scales), "float32", name))


def _scale_payload(graph: Graph, scales: npt.NDArray[Any], name: str) -> Payload:
    """int4's scales must have the network's dtype. Raises BuildError where one becomes zero."""
    payload = float_payload(scales, graph.dtype, name)
    if ((payload.array == 0) & (scales != 0)).any():
        raise BuildError(f"{name} has scales too small for {graph.dtype}; set build.dtype to bfloat16")
    return payload
