"""The type of what is not quantized, and the cast to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import ExportError
from quantize.checkpoint import Checkpoint
from quantize.dtypes import BFLOAT16
from quantize.export.options import ExportOptions
from quantize.quantized_tensor import QuantizedTensor

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
}


def float_dtype(checkpoint: Checkpoint, options: ExportOptions) -> np.dtype[Any]:
    """The type to write floats in. Raises ExportError for one that the consumer does not compute in."""
    if options.dtype == "auto":
        own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        return DTYPES[own] if own in ("float16", "bfloat16") else DTYPES["float16"]
    is_for_kernels = options.format != "compressed-tensors" and options.consumer != "modelopt"
    if options.dtype == "float32" and is_for_kernels:
        raise ExportError(f"the format {options.format!r} is for 16-bit kernels; give --dtype float16 or bfloat16")
    return DTYPES[options.dtype]


def cast(name: str, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``values`` in ``dtype``. Raises ExportError when one of them overflows."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if not np.isfinite(converted).all():
        raise ExportError(
            f"tensor {name!r} has values that are not finite in {dtype.name} (largest: "
            f"{np.abs(values.astype(np.float32)).max():g}); give --dtype bfloat16"
        )
    return converted


def cast_scales(name: str, scales: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``scales`` in ``dtype``. Raises ExportError when one leaves the normal range and would lose its digits."""
    converted = cast(name, scales, dtype)
    smallest = float(converted.astype(np.float32).min())
    if dtype == np.float16 and smallest < float(np.finfo(np.float16).tiny):
        raise ExportError(f"tensor {name!r} has a scale of {smallest:g}, too small for float16; give --dtype bfloat16")
    return converted


def required_scales(name: str, weight: QuantizedTensor) -> npt.NDArray[Any]:
    """The scales of a weight that is quantized. Raises ExportError when it is not."""
    if weight.scales is None:
        raise ExportError(f"tensor {name!r} is not quantized, expected int4, int8 or fp8; quantize the model again")
    return weight.scales
