"""Round-to-nearest of rows of a weight matrix: int4 in groups, int8 and fp8 per output channel.

Every value is rounded against the scale as it is stored. Input rows are finite float32 [rows, in]; scales are finite
and never zero, so a group of zeros dequantizes to zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.float8 import E4M3_MAX, E4M3_VALUES, cast_e4m3
from quantize.packing import pack_uint4
from quantize.weight_rule import FP8_BLOCK, ScaleName

Float32 = npt.NDArray[np.float32]

INT8_MAX = 127.0
# Factors by which the range of a group may shrink: clipping its tails often costs less than coarse steps do.
MSE_FACTORS = tuple(float(factor) for factor in np.linspace(1.0, 0.7, 20).round(4))
_FLOAT16_MARGIN = 0.78  # absmax: scales this near to the end of float16's normal range are stored in float32, too
_FLOAT16 = np.finfo(np.float16)
_FLOAT32_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class RoundedRows:
    values: npt.NDArray[Any]  # as QuantizedTensor.values
    scales: npt.NDArray[Any] | None  # None: the tensor has one scale, which was given
    zero_points: npt.NDArray[np.uint8] | None
    squared_error: float


def round_int8(rows: Float32) -> RoundedRows:
    """Symmetric, one scale per row: values -127..127."""
    scales = _row_scales(rows, INT8_MAX)
    steps = rows / scales
    values = np.clip(np.rint(steps), -INT8_MAX, INT8_MAX)
    return RoundedRows(values.astype(np.int8), scales, None, squared_error(values, steps, scales))


def round_fp8(rows: Float32, scales: Float32 | None = None) -> RoundedRows:
    """e4m3 values; ``scales`` broadcast over ``rows``. None: one per row, which puts its largest magnitude at 448."""
    if scales is None:
        scales = _row_scales(rows, E4M3_MAX)
    steps = rows / scales
    values = cast_e4m3(steps)
    return RoundedRows(values, scales, None, squared_error(E4M3_VALUES[values.view(np.uint8)], steps, scales))


def round_fp8_band(rows: Float32) -> RoundedRows:
    """e4m3 values of at most 128 rows, with one scale for every 128 columns: scales [1, ceil(in / 128)]."""
    largest = np.abs(rows).max(axis=0)
    scales = fp8_scale(np.maximum.reduceat(largest, np.arange(0, len(largest), FP8_BLOCK)))
    rounded = round_fp8(rows, np.repeat(scales, FP8_BLOCK)[None, : rows.shape[1]])
    return RoundedRows(rounded.values, scales[None], None, rounded.squared_error)


def fp8_scale(largest: Float32) -> Float32:
    """The scales that put these largest magnitudes at 448."""
    return usable_scales(largest / np.float32(E4M3_MAX))


def round_int4(
    rows: Float32, group_size: int, *, symmetric: bool, scale: ScaleName, scale_dtype: npt.DTypeLike
) -> RoundedRows | None:
    """Values 0..15 packed in pairs. None when a scale leaves the normal range of float16 that was asked for."""
    # One column per group: NumPy's inner loops then run over many groups, not over the 64 values of one.
    groups = np.ascontiguousarray(rows.reshape(-1, group_size).T)
    base, zeros = int4_range(groups, 0, symmetric=symmetric)
    if np.dtype(scale_dtype) == np.float16 and not _fits_float16(base, scale):
        return None
    factors = MSE_FACTORS if scale == "mse" else (1.0,)
    scales = _search_scales(groups, base, zeros, factors, scale_dtype)
    steps = groups / scales
    values = np.clip(np.rint(steps), -zeros, 15 - zeros)
    error = squared_error(values, steps, scales)
    shape = (rows.shape[0], -1)
    packed = pack_uint4((values + zeros).astype(np.uint8).T.reshape(rows.shape))
    return RoundedRows(
        packed,
        scales.astype(scale_dtype).reshape(shape),
        None if symmetric else zeros.astype(np.uint8).reshape(shape),
        error,
    )


def int4_range(groups: Float32, axis: int, *, symmetric: bool) -> tuple[Float32, Float32]:
    """Scales and zero points of the whole range of each group, zero included; a group lies along ``axis``."""
    low, high = np.minimum(groups.min(axis=axis), 0), np.maximum(groups.max(axis=axis), 0)
    if symmetric:
        # Of -8..7 the side that needs more decides, so that nothing is clipped.
        base = np.maximum(high / 7, -low / 8)
        zeros = np.full_like(base, 8)
    else:
        base = high / 15 - low / 15  # high - low could overflow
        zeros = np.clip(np.rint(-low / np.maximum(base, _FLOAT32_TINY)), 0, 15)
    return usable_scales(base), zeros


def _search_scales(
    groups: Float32, base: Float32, zeros: Float32, factors: tuple[float, ...], dtype: npt.DTypeLike
) -> Float32:
    """The candidate scale with the least squared error, in float32 but already rounded to ``dtype``."""
    candidates = [usable_scales((base * np.float32(factor)).astype(dtype).astype(np.float32)) for factor in factors]
    best = candidates[0]
    if len(candidates) == 1:
        return best
    least = np.full_like(base, np.inf)
    steps, values = np.empty_like(groups), np.empty_like(groups)
    low, high = -zeros, 15 - zeros
    for scales in candidates:
        np.multiply(groups, 1 / scales, out=steps)
        np.rint(steps, out=values)
        np.maximum(values, low, out=values)
        np.minimum(values, high, out=values)
        np.subtract(values, steps, out=values)
        np.multiply(values, values, out=values)
        # In units of the base scale, so that neither huge nor tiny weights leave float32.
        error = values.sum(axis=0) * np.square(scales / base)
        better = error < least
        best = np.where(better, scales, best)
        least = np.where(better, error, least)
    return best


def _row_scales(rows: Float32, largest: float) -> Float32:
    """[rows, 1]"""
    magnitudes = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    return usable_scales(magnitudes / np.float32(largest))


def usable_scales(scales: Float32) -> Float32:
    """1 for groups of zeros; no subnormal scale, whose reciprocal would overflow."""
    return np.where(scales == 0, np.float32(1), np.maximum(scales, _FLOAT32_TINY))


def _fits_float16(base: Float32, scale: ScaleName) -> bool:
    # Below float16's normal range a scale loses digits; the search may shrink it further.
    return bool(base.min() * smallest_factor(scale) >= _FLOAT16.tiny and base.max() <= _FLOAT16.max)


def smallest_factor(scale: ScaleName) -> np.float32:
    """How far a scale may shrink and must still be a normal float16."""
    return np.float32(MSE_FACTORS[-1] if scale == "mse" else _FLOAT16_MARGIN)


def squared_error(values: Float32, steps: Float32, scales: Float32) -> float:
    errors = (values - steps) * scales
    return float(np.square(errors, dtype=np.float64).sum())
