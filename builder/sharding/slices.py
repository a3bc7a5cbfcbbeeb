"""Parts of a quantized matrix as it is stored: views, nothing dequantized, nothing packed anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from builder.sharding.cuts import Axis, Cut
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import QuantizedTensor

FOUR_BITS = ("int4", "nvfp4", "mxfp4")  # two columns in a byte


def cut_weight(weight: QuantizedTensor, cut: Cut) -> QuantizedTensor:
    """The rows or columns of ``cut``. Scales of the whole tensor or of its inputs stay shared by all parts.

    Raises BuildError where a group or block of the scales would be torn; ``share_is_legal`` tells beforehand.
    """
    if not share_is_legal(weight, cut.axis, cut.size):
        raise BuildError(f"{cut.size} {cut.axis} are not a whole number of its {describe_groups(weight)}")
    return _rows(weight, cut) if cut.axis == "rows" else _columns(weight, cut)


def share_is_legal(weight: QuantizedTensor, axis: Axis, size: int) -> bool:
    """Whether equal shares of ``size`` rows or columns leave each group of ``weight`` whole, or lie within one."""
    if axis == "columns" and weight.scheme in FOUR_BITS and size % 2:
        return False
    step = group_length(weight, axis)
    if step is None or size % step == 0:
        return True
    # A share within one group takes its scale along. The blocks of nvfp4 and the mx formats have one length.
    return step % size == 0 and weight.scheme in ("int4", "fp8")


def group_length(weight: QuantizedTensor, axis: Axis) -> int | None:
    """How many neighbours along ``axis`` share a scale; None: all of them."""
    if weight.scales is None or weight.scales.ndim == 0:
        return None
    if has_square_blocks(weight):
        from quantize.weight_rule import FP8_BLOCK

        return FP8_BLOCK
    if axis == "rows":
        return 1
    # One scale a row serves any part of it, whatever its integers or eight-bit floats.
    shared = weight.scheme in ("int8", "fp8") or (weight.scheme == "int4" and weight.scales.shape[1] == 1)
    return None if shared else weight.group_size


def has_square_blocks(weight: QuantizedTensor) -> bool:
    """Whether an fp8 matrix has a scale for each block of 128 rows and 128 columns."""
    scales = weight.scales
    return weight.scheme == "fp8" and scales is not None and scales.ndim == 2 and scales.shape != (weight.shape[0], 1)


def describe_groups(weight: QuantizedTensor) -> str:
    from quantize.weight_rule import FP8_BLOCK

    if has_square_blocks(weight):
        return f"{FP8_BLOCK}x{FP8_BLOCK} {weight.scheme} blocks"
    return f"{weight.scheme} groups of {weight.group_size} columns"


def _rows(weight: QuantizedTensor, cut: Cut) -> QuantizedTensor:
    scales = weight.scales
    if scales is not None and scales.ndim == 2:
        scales = _along(scales, 0, cut, group_length(weight, "rows"))
    zeros = None if weight.zero_points is None else weight.zero_points[cut.begin : cut.end]
    values = weight.values[cut.begin : cut.end]
    return replace(weight, shape=cut.shape_of(weight.shape), values=values, scales=scales, zero_points=zeros)


def _columns(weight: QuantizedTensor, cut: Cut) -> QuantizedTensor:
    per_byte = 2 if weight.scheme in FOUR_BITS else 1
    step = group_length(weight, "columns")
    scales, zeros, multiplier = weight.scales, weight.zero_points, weight.pre_quant_scale
    return replace(
        weight,
        shape=cut.shape_of(weight.shape),
        values=weight.values[:, cut.begin // per_byte : cut.end // per_byte],
        scales=scales if scales is None else _along(scales, 1, cut, step),
        zero_points=zeros if zeros is None else _along(zeros, 1, cut, step),
        group_size=None if weight.group_size is None else min(weight.group_size, cut.size),
        pre_quant_scale=None if multiplier is None else multiplier[cut.begin : cut.end],
    )


def _along(scales: npt.NDArray[Any], axis: int, cut: Cut, step: int | None) -> npt.NDArray[Any]:
    """Those of the groups of ``step`` that ``cut`` touches; all where one scale serves the whole axis."""
    if step is None:
        return scales
    groups = slice(cut.begin // step, -(-cut.end // step))
    return scales[groups] if axis == 0 else scales[:, groups]
