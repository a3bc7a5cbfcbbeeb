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
    scales: npt.NDArray[Any] | None = (
        None  # int4: float16 or float32 [out, in / group_size]; int8, fp8: float32 [out, 1]
    )
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
    entry = _entry_of(checkpoint, name)
    scheme = entry.get("scheme", "none")
    values = checkpoint.load(name)
    if scheme == "none":
        _expect(checkpoint, name, values, values.shape, SOURCE_FLOATS)
        return QuantizedTensor("none", values.shape, values)
    if values.ndim != 2:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has shape {list(values.shape)}, expected a matrix")
    if scheme == "int4":
        return _load_int4(checkpoint, name, values, entry)
    if scheme not in ("int8", "fp8"):
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has the unknown scheme {scheme!r}")
    _expect(checkpoint, name, values, values.shape, ("int8" if scheme == "int8" else "float8_e4m3fn",))
    scales = checkpoint.load(f"{name}_scale")
    _expect(checkpoint, f"{name}_scale", scales, (values.shape[0], 1), ("float32",))
    return QuantizedTensor(scheme, values.shape, values, scales)


def _load_int4(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any], entry: dict[str, Any]) -> QuantizedTensor:
    group_size = entry.get("group_size")
    rows, columns = values.shape[0], values.shape[1] * 2
    if group_size not in GROUP_SIZES or columns % group_size:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has {columns} columns in groups of {group_size!r}, "
            f"expected groups of {', '.join(map(str, GROUP_SIZES))} that divide them"
        )
    _expect(checkpoint, name, values, values.shape, ("uint8",))
    groups = (rows, columns // group_size)
    scales, zeros = checkpoint.load(f"{name}_scale"), None
    _expect(checkpoint, f"{name}_scale", scales, groups, ("float16", "float32"))
    if entry.get("symmetric") is not True:
        zeros = checkpoint.load(f"{name}_zero_point")
        _expect(checkpoint, f"{name}_zero_point", zeros, groups, ("uint8",))
    return QuantizedTensor("int4", (rows, columns), values, scales, zeros, group_size)


def _entry_of(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """What config.json says of the tensor; empty for a checkpoint that is not quantized."""
    config = checkpoint.config.get("quantization_config") or {}
    found = (config.get("quant_method"), config.get("format_version")) if isinstance(config, dict) else (config, None)
    if config and found != (QUANT_METHOD, FORMAT_VERSION):
        raise CheckpointError(
            f"{checkpoint.path}: is quantized by {found[0]!r} (format {found[1]!r}); "
            f"expected {QUANT_METHOD!r} (format {FORMAT_VERSION}) or an original model"
        )
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
