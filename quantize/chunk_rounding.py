"""Rounding of a chunk of rows to the scheme of its tensor: by the compiled kernels, or by NumPy with the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.block_rounding import MX_WAYS, NVFP4_NEIGHBOURS, round_mxfp4, round_mxfp8, round_nvfp4
from quantize.finite import bad_row, check_finite
from quantize.native.kernels import DamagedRowError, Kernels, native_kernels
from quantize.plan import PlannedTensor
from quantize.rounding import (
    MSE_FACTORS,
    RoundedRows,
    round_fp8,
    round_fp8_band,
    round_int4,
    round_int8,
    smallest_factor,
)
from quantize.weight_rule import FloatSettings, Int4Settings, SchemeName

Float32 = npt.NDArray[np.float32]


def round_chunk(
    source: npt.NDArray[Any],
    begin: int,
    planned: PlannedTensor,
    scale_dtype: npt.DTypeLike,
    tensor_scale: np.float32 | None,
) -> tuple[RoundedRows, float] | None:
    """Rows [rows, in] of ``planned`` from row ``begin`` on, and their squared norm.

    None when int4 scales do not fit ``scale_dtype``. Raises QuantizeError for NaN and infinity.
    """
    kernels = native_kernels()
    if kernels is not None and kernels.takes(source.dtype):
        try:
            return _round_natively(kernels, source, planned, scale_dtype, tensor_scale)
        except DamagedRowError as error:
            raise bad_row(planned.info.name, begin + error.row) from None
    rows = source.astype(np.float32, copy=False)
    check_finite(planned.info.name, rows, begin)
    rounded = _round(rows, planned, scale_dtype, tensor_scale)
    return None if rounded is None else (rounded, float(np.square(rows, dtype=np.float64).sum()))


def _round_natively(
    kernels: Kernels,
    source: npt.NDArray[Any],
    planned: PlannedTensor,
    scale_dtype: npt.DTypeLike,
    tensor_scale: np.float32 | None,
) -> tuple[RoundedRows, float] | None:
    if planned.int4 is not None:
        return _int4_natively(kernels, source, planned.int4, scale_dtype)
    if planned.floats is None:
        return kernels.int8(source)
    scale = planned.floats.scale
    if planned.scheme == "mxfp8":
        return kernels.mxfp8(source)
    if planned.scheme == "mxfp4":
        return kernels.mxfp4(source, MX_WAYS[scale or "ceil"])
    if planned.scheme == "nvfp4" and tensor_scale is not None:
        neighbours = NVFP4_NEIGHBOURS if scale == "mse" else (0,)
        return kernels.nvfp4(source, tensor_scale, neighbours, fours=scale == "four-over-six")
    return kernels.fp8_band(source) if planned.floats.granularity == "block" else kernels.fp8(source, tensor_scale)


def _int4_natively(
    kernels: Kernels, source: npt.NDArray[Any], int4: Int4Settings, scale_dtype: npt.DTypeLike
) -> tuple[RoundedRows, float] | None:
    return kernels.int4(
        source,
        int4.group_size,
        symmetric=int4.symmetric,
        factors=MSE_FACTORS if int4.scale == "mse" else (1.0,),
        smallest=smallest_factor(int4.scale),
        scale_dtype=scale_dtype,
    )


def _round(
    rows: Float32, planned: PlannedTensor, scale_dtype: npt.DTypeLike, tensor_scale: np.float32 | None
) -> RoundedRows | None:
    if planned.int4 is not None:
        int4 = planned.int4
        return round_int4(rows, int4.group_size, symmetric=int4.symmetric, scale=int4.scale, scale_dtype=scale_dtype)
    if planned.floats is not None:
        return _round_floats(rows, planned.scheme, planned.floats, tensor_scale)
    return round_int8(rows)


def _round_floats(
    rows: Float32, scheme: SchemeName, floats: FloatSettings, tensor_scale: np.float32 | None
) -> RoundedRows:
    if scheme == "mxfp8":
        return round_mxfp8(rows)
    if scheme == "mxfp4":
        return round_mxfp4(rows, floats.scale)
    if scheme == "nvfp4" and tensor_scale is not None:
        return round_nvfp4(rows, tensor_scale, floats.scale)
    if floats.granularity == "block":
        return round_fp8_band(rows)
    if tensor_scale is None:
        return round_fp8(rows)
    return replace(round_fp8(rows, tensor_scale.reshape(1, 1)), scales=None)  # it is stored once, not by chunks
