"""Rounding to the block formats of floats: NVFP4 (blocks of 16), MXFP4 and MXFP8 (blocks of 32).

Input rows are finite float32 [rows, in]. Every value is rounded against its scale as it is stored; scales are finite
and never zero, so a block of zeros dequantizes to zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.dtypes import FLOAT8_E4M3
from quantize.e8m0 import encode_e8m0, exponents_of, power_of_two
from quantize.float4 import E2M1_MAX, cast_e2m1
from quantize.float8 import E4M3_MAX, E4M3_VALUES, cast_e4m3
from quantize.packing import pack_uint4
from quantize.rounding import RoundedRows, squared_error
from quantize.scale_search import best_e2m1_scales
from quantize.weight_rule import BLOCK_SIZES, ScaleName

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

NVFP4_TENSOR_MAX = E2M1_MAX * E4M3_MAX  # 2688: the largest magnitude in units of the tensor's scale
# Below it the product with the smallest block scale, 2**-9, would leave the normal range of float32.
_SMALLEST_TENSOR_SCALE = np.float32(2.0**-117)
_ONE = np.uint8(0x38)  # e4m3 1.0
_SMALLEST, _LARGEST = 1, 126  # e4m3 codes of 2**-9 and 448
MX_WAYS = {"ceil": (True,), "ocp": (False,), "best-of-two": (False, True)}
# Neighbours of the scale that puts the largest magnitude at 6, from clipping a third off to putting it below 4.
NVFP4_NEIGHBOURS = (0, *range(-5, 0), *range(1, 7))


def nvfp4_tensor_scale(largest: np.float32) -> np.float32:
    """The scale of a tensor, or of several that share it, of this largest magnitude; 1 where all is zero."""
    scale = np.float32(largest / np.float32(NVFP4_TENSOR_MAX))
    return np.float32(1) if largest == 0 else max(scale, _SMALLEST_TENSOR_SCALE)


def round_nvfp4(rows: Float32, tensor_scale: np.float32, scale: ScaleName | None) -> RoundedRows:
    """E2M1 codes packed in pairs [rows, in / 2] and e4m3 scales [rows, in / 16], to be multiplied by ``tensor_scale``.

    ``scale``: "absmax" puts the largest magnitude of a block at 6, "four-over-six" at 6 or 4, whichever errs less
    (arXiv 2512.02010), "mse" takes the best of all e4m3 scales nearby.
    """
    blocks = _blocks(rows, BLOCK_SIZES["nvfp4"])
    magnitudes = np.abs(blocks)
    codes = _nvfp4_scales(magnitudes, tensor_scale, scale)
    rounded = _round_fp4(rows.shape, blocks, E4M3_VALUES[codes] * tensor_scale)
    return RoundedRows(rounded[0], codes.reshape(len(rows), -1).view(FLOAT8_E4M3), None, rounded[1])


def round_mxfp4(rows: Float32, scale: ScaleName | None) -> RoundedRows:
    """E2M1 codes packed in pairs [rows, in / 2] and E8M0 scales [rows, in / 32].

    ``scale``: "ceil" clips nothing, "ocp" is the specification's, "best-of-two" the one of them that errs less.
    """
    blocks = _blocks(rows, BLOCK_SIZES["mxfp4"])
    magnitudes = np.abs(blocks)
    largest = magnitudes.max(axis=0)
    ways = MX_WAYS.get(scale or "ceil", (True,))
    candidates = np.stack([exponents_of(largest, E2M1_MAX, ceil=ceil) for ceil in ways])
    exponents = candidates[0]
    if len(ways) > 1:
        best = best_e2m1_scales(magnitudes, power_of_two(candidates))
        exponents = np.take_along_axis(candidates, best[None], axis=0)[0]
    values, error = _round_fp4(rows.shape, blocks, power_of_two(exponents))
    return RoundedRows(values, encode_e8m0(exponents).reshape(len(rows), -1), None, error)


def round_mxfp8(rows: Float32) -> RoundedRows:
    """e4m3 values [rows, in] and E8M0 scales [rows, in / 32], the smallest that clip nothing."""
    size = BLOCK_SIZES["mxfp8"]
    largest = np.abs(rows).reshape(len(rows), -1, size).max(axis=2)
    exponents = exponents_of(largest, E4M3_MAX, ceil=True)
    scales = np.repeat(power_of_two(exponents), size, axis=1)
    steps = rows / scales
    values = cast_e4m3(steps)
    error = squared_error(E4M3_VALUES[values.view(np.uint8)], steps, scales)
    return RoundedRows(values, encode_e8m0(exponents), None, error)


def _blocks(rows: Float32, size: int) -> Float32:
    """[size, num_blocks]: NumPy's inner loops then run over many blocks, not over the few values of one."""
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def _nvfp4_scales(magnitudes: Float32, tensor_scale: np.float32, scale: ScaleName | None) -> UInt8:
    """e4m3 codes of the scales of blocks [16, num_blocks]."""
    largest = magnitudes.max(axis=0) / tensor_scale
    plain = _scale_codes(largest / np.float32(E2M1_MAX))
    if scale == "four-over-six":
        candidates = np.stack([plain, _scale_codes(largest / np.float32(4))])
    else:
        neighbours = NVFP4_NEIGHBOURS if scale == "mse" else (0,)
        moved = plain.astype(np.int16) + np.array(neighbours, np.int16)[:, None]
        candidates = np.clip(moved, _SMALLEST, _LARGEST).astype(np.uint8)
    if len(candidates) > 1:
        best = best_e2m1_scales(magnitudes, E4M3_VALUES[candidates] * tensor_scale)
        plain = np.take_along_axis(candidates, best[None], axis=0)[0]
    return np.where(largest == 0, _ONE, plain)


def _scale_codes(scales: Float32) -> UInt8:
    # Rounding to zero would turn a block of small weights into zeros.
    return np.maximum(cast_e4m3(scales).view(np.uint8), np.uint8(_SMALLEST))


def _round_fp4(shape: tuple[int, ...], blocks: Float32, scales: Float32) -> tuple[UInt8, float]:
    """Packed codes of rows of ``shape``, and the squared error."""
    steps = blocks / scales
    codes, magnitudes = cast_e2m1(steps)
    return pack_uint4(codes.T.reshape(shape)), squared_error(magnitudes, np.abs(steps), scales)
