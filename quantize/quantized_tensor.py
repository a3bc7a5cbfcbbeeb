"""A weight matrix as the quantized checkpoint stores it, and back to float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.activations import Activations, activations_of, input_scale_name, pre_quant_scale_name
from quantize.checkpoint import Checkpoint
from quantize.dtypes import SOURCE_FLOATS
from quantize.e8m0 import E8M0_NAN, decode_e8m0
from quantize.float4 import decode_packed_e2m1
from quantize.packing import unpack_uint4
from quantize.stored_specs import fp8_scale_shape
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK, GROUP_SIZES, SchemeName

FORMAT_VERSION = 1
QUANT_METHOD = "plansmith"
INT4_SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class QuantizedTensor:
    """W = (q - z) * s, and for nvfp4 times the scale of the tensor. The arrays may be read-only views of a mapped file.

    ``scales`` by scheme: int4 float16 or float32 [out, in / group_size]; int8 float32 [out, 1]; fp8 float32 [out, 1],
    [] for the whole tensor, or [ceil(out / 128), ceil(in / 128)] of blocks; nvfp4 float8_e4m3fn [out, in / 16];
    mxfp4 and mxfp8 uint8 [out, in / 32], exponents + 127 of two.
    """

    scheme: SchemeName
    shape: tuple[int, ...]  # logical: [out, in]; a kept vector: [n]
    values: npt.NDArray[Any]  # four bits: uint8 [out, in / 2]; eight: int8 or float8_e4m3fn [out, in]; none: floats
    scales: npt.NDArray[Any] | None = None
    zero_points: npt.NDArray[np.uint8] | None = None  # int4 asymmetric: [out, in / group_size], 0..15
    group_size: int | None = None  # columns that share a scale: int4, nvfp4, mxfp4, mxfp8
    tensor_scale: npt.NDArray[np.float32] | None = None  # nvfp4: []
    activations: Activations | None = None  # what happens to the inputs; None: they stay floats
    input_scale: npt.NDArray[np.float32] | None = None  # of static activations: []
    pre_quant_scale: npt.NDArray[np.float32] | None = None  # [in], the inputs are multiplied by it first

    @property
    def is_symmetric(self) -> bool:
        return self.zero_points is None

    @property
    def nbytes(self) -> int:
        """Bytes as stored, scales and zero points included."""
        stored = (self.values, self.scales, self.zero_points, self.tensor_scale)
        return sum(array.nbytes for array in stored if array is not None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(prod(self.shape), 1)

    def unpacked(self) -> npt.NDArray[np.uint8]:
        """int4's values, one per byte, unsigned 0..15: [out, in]."""
        return unpack_uint4(self.values)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The whole matrix in float32, [out, in]: what inputs times ``pre_quant_scale`` are multiplied with."""
        if self.scales is None:
            return self.values.astype(np.float32)
        if self.scheme == "int4":
            return self._dequantize_int4(self.scales.astype(np.float32))
        if self.scheme in BLOCK_SIZES:
            return self._dequantize_blocks(self.scales)
        scales = self.scales
        if scales.ndim == 2 and scales.shape != (self.shape[0], 1):
            rows, columns = self.shape
            scales = np.repeat(np.repeat(scales, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :columns]
        return np.asarray(self.values.astype(np.float32) * scales, np.float32)

    def effective(self) -> npt.NDArray[np.float32]:
        """What the inputs themselves are multiplied with in effect: [out, in]."""
        weights = self.dequantize()
        return weights if self.pre_quant_scale is None else weights * self.pre_quant_scale

    def _dequantize_int4(self, scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        values = self.unpacked().astype(np.float32).reshape(*scales.shape, -1)
        zeros = INT4_SYMMETRIC_ZERO if self.zero_points is None else self.zero_points.astype(np.float32)[..., None]
        return np.asarray((values - zeros) * scales[..., None], np.float32).reshape(self.shape)

    def _dequantize_blocks(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        values = self.values.astype(np.float32) if self.scheme == "mxfp8" else decode_packed_e2m1(self.values)
        scales = stored.astype(np.float32) if self.scheme == "nvfp4" else decode_e8m0(stored)
        scaled = values.reshape(*scales.shape, -1) * scales[..., None]  # exact: few digits times few digits
        if self.tensor_scale is not None:
            scaled *= self.tensor_scale
        return scaled.reshape(self.shape)


def load_weight(checkpoint: Checkpoint, name: str) -> QuantizedTensor:
    """Read one weight of any checkpoint; one that is not quantized has the scheme "none".

    Raises CheckpointError when a tensor of a quantized checkpoint is missing or does not fit its description.
    """
    entry = _entry_of(checkpoint, name)
    weight = _load_weight(checkpoint, name, entry)
    return _with_inputs(checkpoint, name, weight, entry) if weight.scheme != "none" else weight


def _load_weight(checkpoint: Checkpoint, name: str, entry: dict[str, Any]) -> QuantizedTensor:
    scheme = entry.get("scheme", "none")
    values = checkpoint.load(name)
    if scheme == "none":
        _expect(checkpoint, name, values, values.shape, SOURCE_FLOATS)
        return QuantizedTensor("none", values.shape, values)
    if values.ndim != 2:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has shape {list(values.shape)}, expected a matrix")
    if scheme == "int4":
        return _load_int4(checkpoint, name, values, entry)
    if isinstance(scheme, str) and scheme in BLOCK_SIZES:
        return _load_blocks(checkpoint, name, values, entry)
    if scheme not in ("int8", "fp8"):
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has the unknown scheme {scheme!r}")
    _expect(checkpoint, name, values, values.shape, ("int8" if scheme == "int8" else "float8_e4m3fn",))
    granularity = entry.get("granularity", "channel")
    if granularity not in ("channel", *(("tensor", "block") if scheme == "fp8" else ())):
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has the unknown granularity {granularity!r}")
    expected = fp8_scale_shape((values.shape[0], values.shape[1]), granularity)
    scales = checkpoint.load(f"{name}_scale")
    _expect(checkpoint, f"{name}_scale", scales, expected, ("float32",))
    return QuantizedTensor(scheme, values.shape, values, scales)


def _with_inputs(checkpoint: Checkpoint, name: str, weight: QuantizedTensor, entry: dict[str, Any]) -> QuantizedTensor:
    """``weight`` with what is stored of its inputs."""
    try:
        activations = activations_of(entry)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r}: {error}; quantize the model again") from None
    input_scale, pre_quant_scale = None, None
    if activations is not None and activations.scale == "static":
        input_scale = _load_float32(checkpoint, input_scale_name(name), ())
    if entry.get("pre_quant_scale") is True:
        pre_quant_scale = _load_float32(checkpoint, pre_quant_scale_name(name), weight.shape[1:])
    if activations is None and pre_quant_scale is None:
        return weight
    return replace(weight, activations=activations, input_scale=input_scale, pre_quant_scale=pre_quant_scale)


def _load_float32(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = checkpoint.load(name)
    _expect(checkpoint, name, values, shape, ("float32",))
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has a value that is no positive number; quantize the model again"
        )
    return values


def _load_int4(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any], entry: dict[str, Any]) -> QuantizedTensor:
    group_size = entry.get("group_size")
    rows, columns = values.shape[0], values.shape[1] * 2
    if group_size != columns and (group_size not in GROUP_SIZES or columns % group_size):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has {columns} columns in groups of {group_size!r}, "
            f"expected groups of {', '.join(map(str, GROUP_SIZES))} that divide them, or all of them"
        )
    _expect(checkpoint, name, values, values.shape, ("uint8",))
    groups = (rows, columns // group_size)
    scales, zeros = checkpoint.load(f"{name}_scale"), None
    _expect(checkpoint, f"{name}_scale", scales, groups, ("float16", "float32"))
    if entry.get("symmetric") is not True:
        zeros = checkpoint.load(f"{name}_zero_point")
        _expect(checkpoint, f"{name}_zero_point", zeros, groups, ("uint8",))
    return QuantizedTensor("int4", (rows, columns), values, scales, zeros, group_size)


def _load_blocks(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any], entry: dict[str, Any]) -> QuantizedTensor:
    scheme: SchemeName = entry["scheme"]
    size = BLOCK_SIZES[scheme]
    rows, columns = values.shape[0], values.shape[1] * (1 if scheme == "mxfp8" else 2)
    if entry.get("group_size") != size or columns % size:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has {columns} columns in blocks of {entry.get('group_size')!r}, "
            f"expected blocks of {size} that divide them"
        )
    _expect(checkpoint, name, values, values.shape, ("float8_e4m3fn" if scheme == "mxfp8" else "uint8",))
    scales, tensor_scale = checkpoint.load(f"{name}_scale"), None
    scale_dtype = "float8_e4m3fn" if scheme == "nvfp4" else "uint8"
    _expect(checkpoint, f"{name}_scale", scales, (rows, columns // size), (scale_dtype,))
    if scheme == "nvfp4":
        tensor_scale = checkpoint.load(f"{name}_scale_2")
        _expect(checkpoint, f"{name}_scale_2", tensor_scale, (), ("float32",))
    elif (scales == E8M0_NAN).any():
        raise CheckpointError(f"{checkpoint.path}: tensor '{name}_scale' holds NaN (255); quantize the model again")
    return QuantizedTensor(scheme, (rows, columns), values, scales, None, size, tensor_scale)


def check_readable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint that another tool or another version of this one quantized."""
    config = checkpoint.config.get("quantization_config") or {}
    found = (config.get("quant_method"), config.get("format_version")) if isinstance(config, dict) else (config, None)
    if config and found != (QUANT_METHOD, FORMAT_VERSION):
        advice = "quantize it again" if found[0] == QUANT_METHOD else "read it with plansmith quantize --recipe none"
        raise CheckpointError(
            f"{checkpoint.path}: is quantized by {found[0]!r} (format {found[1]!r}); "
            f"expected {QUANT_METHOD!r} (format {FORMAT_VERSION}) or an original model; {advice}"
        )


def _entry_of(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """What config.json says of the tensor; empty for a checkpoint that is not quantized."""
    check_readable(checkpoint)
    config = checkpoint.config.get("quantization_config") or {}
    tensors = config.get("tensors") or {}
    entry = tensors.get(name) or {} if isinstance(tensors, dict) else None
    if not isinstance(entry, dict):
        raise CheckpointError(f"{checkpoint.path}: quantization_config does not describe tensors as expected")
    return entry


def _expect(
    checkpoint: Checkpoint,
    name: str,
    array: npt.NDArray[Any],
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> None:
    if array.shape != shape or array.dtype.name not in dtypes:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} is {array.dtype.name} {list(array.shape)}, "
            f"expected {' or '.join(dtypes)} {list(shape)}"
        )
