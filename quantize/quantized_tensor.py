"""A weight matrix as the quantized checkpoint stores it, and back to float32."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint
from quantize.dtypes import SOURCE_FLOATS
from quantize.packing import unpack_uint4
from quantize.recipe import GROUP_SIZES, SchemeName

FORMAT_VERSION = 1
QUANT_METHOD = "plansmith"
INT4_SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class QuantizedTensor:
    """W = (q - z) * s. The arrays may be read-only views of a mapped file."""

    scheme: SchemeName
    shape: tuple[int, ...]  # logical: [out, in]; a kept vector: [n]
    values: npt.NDArray[Any]  # int4: uint8 [out, in / 2]; int8 or float8_e4m3fn [out, in]; none: floats of ``shape``
    scales: npt.NDArray[Any] | None = None  # int4: float16 or float32 [out, in / group_size]; int8, fp8: float32 [out, 1]
    zero_points: npt.NDArray[np.uint8] | None = None  # int4 asymmetric: [out, in / group_size], 0..15
    group_size: int | None = None  # int4

    @property
    def is_symmetric(self) -> bool:
        return self.zero_points is None

    @property
    def nbytes(self) -> int:
        """Bytes as stored, scales and zero points included."""
        return sum(array.nbytes for array in (self.values, self.scales, self.zero_points) if array is not None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(prod(self.shape), 1)

    def unpacked(self) -> npt.NDArray[np.uint8]:
        """int4's values, one per byte, unsigned 0..15: [out, in]."""
        return unpack_uint4(self.values)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The whole matrix in float32: [out, in]."""
        if self.scales is None:
            return self.values.astype(np.float32)
        scales = self.scales.astype(np.float32)
        if self.scheme != "int4":
            return np.asarray(self.values.astype(np.float32) * scales, np.float32)
        values = self.unpacked().astype(np.float32).reshape(*scales.shape, -1)
        zeros = INT4_SYMMETRIC_ZERO if self.zero_points is None else self.zero_points.astype(np.float32)[..., None]
        return np.asarray((values - zeros) * scales[..., None], np.float32).reshape(self.shape)


def load_weight(checkpoint: Checkpoint, name: str) -> QuantizedTensor:
    """Read one weight of any checkpoint; one that is not quantized has the scheme "none".

    Raises CheckpointError when a tensor of a quantized checkpoint is missing or does not fit its description.
    """
    method = checkpoint.config.get("quantization_config") or {}
    if method and method.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(
            f"{checkpoint.path}: is quantized by {method.get('quant_method')!r}; expected {QUANT_METHOD!r} or an original model"
        )
    if method and method.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint.path}: is a quantized checkpoint of format {method.get('format_version')!r}, expected {FORMAT_VERSION}"
        )
    entry = (method.get("tensors") or {}).get(name)
    values = checkpoint.load(name)
    if entry is None or entry.get("scheme") == "none":
        return _kept(checkpoint, name, values)
    return _quantized(checkpoint, name, values, entry)


def _kept(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any]) -> QuantizedTensor:
    if values.dtype.name not in SOURCE_FLOATS:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} is {values.dtype.name}, expected one of {', '.join(sorted(SOURCE_FLOATS))}")
    return QuantizedTensor("none", values.shape, values)


def _quantized(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any], entry: dict[str, Any]) -> QuantizedTensor:
    """Put a weight together, checking every array: the file comes from outside."""
    scheme, group_size = entry.get("scheme"), entry.get("group_size")
    stored = {"int4": "uint8", "int8": "int8", "fp8": "float8_e4m3fn"}.get(str(scheme))
    if stored is None or (scheme == "int4" and group_size not in GROUP_SIZES):
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has the unknown scheme {scheme!r} with group size {group_size!r}")
    if values.ndim != 2:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has shape {list(values.shape)}, expected a matrix")
    _expect(checkpoint, name, values, values.shape, (stored,))
    rows, columns = values.shape[0], values.shape[1] * (2 if scheme == "int4" else 1)
    num_groups = columns // group_size if scheme == "int4" else 1
    if scheme == "int4" and columns % group_size:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has {columns} columns, not a multiple of its group size {group_size}")
    scales = checkpoint.load(f"{name}_scale")
    _expect(checkpoint, f"{name}_scale", scales, (rows, num_groups), ("float16", "float32") if scheme == "int4" else ("float32",))
    zeros = None
    if scheme == "int4" and not entry.get("symmetric"):
        zeros = checkpoint.load(f"{name}_zero_point")
        _expect(checkpoint, f"{name}_zero_point", zeros, (rows, num_groups), ("uint8",))
    return QuantizedTensor(scheme, (rows, columns), values, scales, zeros, group_size if scheme == "int4" else None)  # type: ignore[arg-type]


def _expect(checkpoint: Checkpoint, name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if array.shape != shape or array.dtype.name not in dtypes:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} is {array.dtype.name} {list(array.shape)}, expected {' or '.join(dtypes)} {list(shape)}"
        )
