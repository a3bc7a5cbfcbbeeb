"""What a candidate would make of a unit's weights: the values that a reader sees, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantize.architectures import fused_set
from quantize.block_rounding import nvfp4_tensor_scale
from quantize.checkpoint import TensorInfo
from quantize.chunk_rounding import round_chunk
from quantize.finite import check_finite
from quantize.plan import PlannedTensor
from quantize.quantized_tensor import QuantizedTensor
from quantize.rounding import RoundedRows, fp8_scale
from quantize.stored_specs import stored_specs
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK, WeightRule

Float32 = npt.NDArray[np.float32]
KeptDtype = Callable[[str], "np.dtype[np.generic]"]
"""How scheme none stores the weight of a name."""


@dataclass(frozen=True)
class RoundedUnit:
    weights: dict[str, Float32]  # by name, [out, in], dequantized
    nbytes: int  # stored, with scales and zero points


def nearest_rule(rule: WeightRule) -> WeightRule:
    """``rule`` without what calibration adds: a calibrated candidate is judged by rounding to nearest."""
    if rule.int4 is None or not rule.int4.is_calibrated:
        return rule
    return WeightRule(scheme=rule.scheme, group_size=rule.group_size, symmetric=rule.symmetric)


def round_unit(weights: Mapping[str, Float32], rule: WeightRule, kept_dtype: KeptDtype) -> RoundedUnit:
    """``weights``: of the unit, by name, [out, in].

    Raises QuantizeError for values that are not finite and for a group that does not divide the columns.
    """
    rule = nearest_rule(rule)
    rounded, nbytes = {}, 0
    for name, matrix in weights.items():
        stored = _round_matrix(name, matrix, rule, kept_dtype(name), _scale_of_tensor(name, weights, rule))
        rounded[name] = stored.dequantize()
        nbytes += stored.nbytes
    return RoundedUnit(rounded, nbytes)


def _scale_of_tensor(name: str, weights: Mapping[str, Float32], rule: WeightRule) -> np.float32 | None:
    """For the schemes that have one: nvfp4's is shared by what run-times fuse, that of an fp8 tensor may be."""
    floats = rule.floats
    if rule.scheme != "nvfp4" and (floats is None or floats.granularity != "tensor"):
        return None
    is_shared = rule.scheme == "nvfp4" or (floats is not None and floats.share_scale)
    sharing = [weights[other] for other in fused_set(name) if other in weights] if is_shared else [weights[name]]
    largest = np.float32(max(np.abs(matrix).max() for matrix in sharing))
    return nvfp4_tensor_scale(largest) if rule.scheme == "nvfp4" else np.float32(fp8_scale(np.array(largest)))


def _round_matrix(
    name: str, matrix: Float32, rule: WeightRule, kept_dtype: np.dtype[np.generic], scale: np.float32 | None
) -> QuantizedTensor:
    info = TensorInfo(name, "float32", matrix.shape, matrix.nbytes)
    int4 = None if rule.int4 is None else rule.int4.for_columns(matrix.shape[1])
    planned = PlannedTensor(info, rule.scheme, int4, stored_specs(info, rule, kept_dtype), rule.floats)
    if rule.scheme == "none":
        return _keep(name, matrix, kept_dtype)
    parts = _round_bands(matrix, planned, scale, np.float16) or _round_bands(matrix, planned, scale, np.float32) or []
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    tensor = QuantizedTensor(
        rule.scheme,
        matrix.shape,
        np.concatenate([part.values for part in parts]),
        np.concatenate(scales) if scales else None,
        np.concatenate(zeros) if zeros else None,
        int4.group_size if int4 else BLOCK_SIZES.get(rule.scheme),
    )
    if scale is None:
        return tensor
    stored = np.array(scale)
    return replace(tensor, tensor_scale=stored) if rule.scheme == "nvfp4" else replace(tensor, scales=stored)


def _keep(name: str, matrix: Float32, dtype: np.dtype[np.generic]) -> QuantizedTensor:
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
        kept = matrix.astype(dtype)
    check_finite(name, kept.astype(np.float32), 0, f"does not fit {dtype.name}; change keep_dtype")
    return QuantizedTensor("none", matrix.shape, kept)


def _round_bands(
    matrix: Float32, planned: PlannedTensor, scale: np.float32 | None, scale_dtype: type
) -> list[RoundedRows] | None:
    """In bands of 128 rows, as fp8's blocks need it and as caches like it. None when float16 scales do not fit."""
    bands = []
    for begin in range(0, len(matrix), FP8_BLOCK):
        rounded = round_chunk(matrix[begin : begin + FP8_BLOCK], begin, planned, scale_dtype, scale)
        if rounded is None:
            return None
        bands.append(rounded[0])
    return bands
