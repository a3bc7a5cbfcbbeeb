"""Tensors of TensorRT's types as NumPy arrays.

Between layers a tensor of a float type is an array of its own type (float16, bfloat16, float8), or float32 that holds
nothing but values of that type: arithmetic is done in float32 and rounded to the layer's type after each layer. int4
is int8, fp4 and e8m0 are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from quantize.dtypes import BFLOAT16, FLOAT8_E4M3
from quantize.e8m0 import decode_e8m0
from quantize.float4 import decode_packed_e2m1, round_e2m1
from quantize.float8 import E4M3_VALUES, cast_e4m3
from quantize.packing import unpack_uint4

Array = npt.NDArray[Any]

DTYPE_NAMES = {  # of TensorRT's DataType members
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "fp8",
    "INT4": "int4",
    "FP4": "fp4",
    "E8M0": "e8m0",
}
# What an array of the type may be given in, and what it is then seen as.
_STORED: dict[str, tuple[np.dtype[Any], ...]] = {
    "float32": (np.dtype(np.float32),),
    "float16": (np.dtype(np.float16),),
    "bfloat16": (BFLOAT16, np.dtype(np.uint16)),
    "int8": (np.dtype(np.int8),),
    "int32": (np.dtype(np.int32),),
    "int64": (np.dtype(np.int64),),
    "bool": (np.dtype(np.bool_), np.dtype(np.uint8)),
    "uint8": (np.dtype(np.uint8),),
    "fp8": (FLOAT8_E4M3, np.dtype(np.uint8)),
}
_PLAIN = {name: kinds[0] for name, kinds in _STORED.items()}
_FLOATS = ("float32", "float16", "bfloat16", "fp8", "fp4", "e8m0")


class Payload(Protocol):
    """What was given to TensorRT for one constant, or is given as one external weight."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def array(self) -> Array:
        """Raw elements: bf16 as uint16, int4 and fp4 two in a uint8 (low nibble first), fp8 and e8m0 as uint8."""
        ...


def decode_payload(payload: Payload) -> Array:
    """The values of a payload in its logical shape; float types as float32, int4 as int8."""
    raw = np.ascontiguousarray(payload.array).reshape(-1)
    values: Array
    if payload.dtype == "int4":
        # Two's complement nibbles: flipping the sign bit and taking 8 away sign-extends them.
        values = (unpack_uint4(raw) ^ np.uint8(8)).astype(np.int8) - np.int8(8)
    elif payload.dtype == "fp4":
        values = decode_packed_e2m1(raw)
    elif payload.dtype == "e8m0":
        values = decode_e8m0(raw)
    else:
        values = as_float(raw.view(_PLAIN[payload.dtype]))
    return values.reshape(payload.shape)


def as_stored(dtype: str, values: Array) -> Array:
    """``values`` seen in the type they stand for, without a copy. Raises ValueError where they cannot be of it."""
    kinds = _STORED.get(dtype, ())
    if values.dtype not in kinds:
        raise ValueError(f"is {values.dtype}, expected {' or '.join(str(kind) for kind in kinds) or 'a constant'}")
    return values if values.dtype == kinds[0] else values.view(kinds[0])


def to_stored(dtype: str, values: Array) -> Array:
    """Values of a network's output in the type they stand for."""
    return values.astype(_PLAIN[dtype], copy=False)


def allocate(dtype: str, shape: Sequence[int]) -> Array:
    """Zeros of a type that a network's inputs have."""
    return np.zeros(tuple(shape), _PLAIN[dtype])


def as_float(values: Array) -> Array:
    """Float types as float32, exactly; others as they are."""
    if values.dtype in (np.float16, BFLOAT16):
        return values.astype(np.float32)
    return E4M3_VALUES[values.view(np.uint8)] if values.dtype == FLOAT8_E4M3 else values


def round_to(dtype: str, values: Array) -> Array:
    """The nearest values of ``dtype``, ties to even; float types as float32.

    Beyond the largest: infinity in float16 and bfloat16 (IEEE 754), saturated in fp8 and fp4 (TensorRT, "Quantization
    schemes": docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/quantized-types-schemes.html).
    """
    if dtype not in _FLOATS:
        return np.clip(values, -8, 7).astype(np.int8) if dtype == "int4" else values.astype(_PLAIN[dtype], copy=False)
    exact = np.asarray(values, np.float32)
    if dtype == "float16":
        return exact.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    if dtype == "fp8":
        return as_float(cast_e4m3(np.ascontiguousarray(exact)))
    return _round_e2m1(exact) if dtype == "fp4" else exact


def _round_e2m1(values: Array) -> Array:
    magnitudes = np.empty(values.shape, np.float32)
    round_e2m1(np.abs(values), magnitudes, np.empty(values.shape, np.uint32))
    return np.copysign(magnitudes, values)


def is_of(dtype: str, values: Array) -> bool:
    """Whether an array may stand for a tensor of ``dtype`` between layers."""
    if values.dtype == np.float32:
        return dtype in _FLOATS
    return bool(values.dtype == (np.int8 if dtype == "int4" else _PLAIN.get(dtype)))


def same_carrier(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of one tensor type in one NumPy type."""
    return list(arrays) if len({array.dtype for array in arrays}) == 1 else [as_float(array) for array in arrays]
