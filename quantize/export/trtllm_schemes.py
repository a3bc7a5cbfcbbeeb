"""What TensorRT-LLM 1.2 calls each scheme, and the tensors that a linear has in it: names, types and shapes.

tensorrt_llm/quantization/{mode,layers}.py, layers/moe.py and preprocess_weights of models/modeling_utils.py (1.2); the
ModelOpt 0.47 exporter writes the same for FP8, W4A16_AWQ, W4A8_AWQ, W8A8_SQ_PER_CHANNEL and NVFP4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantize.dtypes import FLOAT8_E4M3
from quantize.export.scheme import LinearScheme
from quantize.weight_rule import BLOCK_SIZES

MIXED_PRECISION = "MIXED_PRECISION"  # of a whole model: every module's own is in quant_cfg.json
SQ_PLUGIN = "W8A8_SQ_PER_CHANNEL_PLUGIN"
SQ_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
FP8_ROWWISE = "FP8_PER_CHANNEL_PER_TOKEN"
AWQ = ("W4A16_AWQ", "W4A8_AWQ")
WHOLE_BLOCKS = (FP8_ROWWISE, SQ_PLUGIN, SQ_TOKEN_PLUGIN)  # they replace attention, MLP and norms, not single linears
QUANTIZED_BY_BUILDER = ("W8A16", "W4A16")  # stored as floats

_ALGORITHMS: dict[tuple[str, str | None], str] = {  # weights, inputs
    ("int4", None): "W4A16_AWQ",
    ("int4", "static fp8"): "W4A8_AWQ",
    ("fp8 tensor", "static fp8"): "FP8",
    ("fp8 channel", None): FP8_ROWWISE,
    ("fp8 channel", "token fp8"): FP8_ROWWISE,
    ("int8", "static int8"): "W8A8_SQ_PER_CHANNEL",
    ("int8", "token int8"): SQ_TOKEN_PLUGIN,
    ("nvfp4", "static nvfp4"): "NVFP4",
}
_ALWAYS_PREQUANT = ("W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")  # the loader reads factors of the inputs without asking
_INT8, _UINT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.float32)
_ONE = (1,)
_NVFP4_BLOCK = BLOCK_SIZES["nvfp4"]


@dataclass(frozen=True)
class ModuleScheme:
    """Of one module; ``algorithm`` None: not quantized. ``has_prequant``: factors of the inputs are stored."""

    algorithm: str | None = None
    group_size: int = 128  # of INT4 and NVFP4
    has_prequant: bool = False
    has_zero: bool = False

    def entry(self) -> dict[str, Any]:
        """As config.json's ``quantization``, or quant_cfg.json of one layer, says it. Other keys are errors there."""
        if self.algorithm in AWQ:
            group = {"group_size": self.group_size, "has_zero_point": self.has_zero}
            return {"quant_algo": self.algorithm, **group, "pre_quant_scale": self.has_prequant}
        if self.algorithm == "NVFP4":
            return {"quant_algo": self.algorithm, "group_size": self.group_size}
        return {"quant_algo": self.algorithm}


@dataclass(frozen=True)
class Part:
    """One tensor "module.suffix" of a rank."""

    suffix: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_scale: bool = True


def module_scheme(scheme: LinearScheme) -> ModuleScheme | None:
    """None for a scheme that the format does not have."""
    if scheme.name == "none":
        return ModuleScheme()
    weights = f"fp8 {scheme.granularity}" if scheme.name == "fp8" else scheme.name
    inputs = None if scheme.activations is None else f"{scheme.activations.scale} {scheme.activations.scheme}"
    algorithm = _ALGORITHMS.get((weights, inputs)) if scheme.symmetric else None
    if algorithm is None:
        return None
    has_prequant = algorithm in _ALWAYS_PREQUANT or (scheme.has_pre_quant_scale and algorithm in AWQ)
    return ModuleScheme(algorithm, scheme.group_size or 128, has_prequant)


def linear_parts(
    own: ModuleScheme, rows: int, columns: int, dtype: np.dtype[Any], *, is_row_split: bool = False
) -> Iterator[Part]:
    """What a rank stores of a linear [rows, columns] but its bias. ``dtype``: of everything that is not quantized."""
    if own.algorithm is None or own.algorithm in QUANTIZED_BY_BUILDER:
        yield Part("weight", dtype, (rows, columns), is_scale=False)
    elif own.algorithm in AWQ:
        yield from _awq(own, rows, columns, dtype)
    elif own.algorithm == "NVFP4":
        yield Part("weight", _UINT8, (rows, columns // 2), is_scale=False)
        yield Part("weights_scaling_factor", FLOAT8_E4M3, (rows, columns // _NVFP4_BLOCK))
        yield Part("weights_scaling_factor_2", _FLOAT32, _ONE)
        yield Part("activation_scaling_factor", _FLOAT32, _ONE)
    elif own.algorithm in ("FP8", FP8_ROWWISE):
        yield Part("weight", FLOAT8_E4M3, (rows, columns), is_scale=False)
        yield from _fp8_scales(own, rows)
    else:
        yield Part("weight", _INT8, (rows, columns), is_scale=False)
        yield from _int8_scales(own, rows, columns, dtype, is_row_split)


def _awq(own: ModuleScheme, rows: int, columns: int, dtype: np.dtype[Any]) -> Iterator[Part]:
    groups = columns // own.group_size
    yield Part("weight", _INT8, (rows // 2, columns), is_scale=False)
    yield Part("weights_scaling_factor", _FLOAT32, (rows, groups))
    if own.algorithm == "W4A8_AWQ":
        yield Part("weights_scaling_factor_2", _FLOAT32, _ONE)
        yield Part("activation_scaling_factor", _FLOAT32, _ONE)
    if own.has_prequant:
        yield Part("prequant_scaling_factor", dtype, (columns,))
    if own.has_zero:  # the loader transposes the scales, and takes these as they are
        yield Part("zero", dtype, (groups, rows), is_scale=False)


def _fp8_scales(own: ModuleScheme, rows: int) -> Iterator[Part]:
    if own.algorithm == FP8_ROWWISE:
        yield Part("per_channel_scale", _FLOAT32, (rows,))
        return
    yield Part("weights_scaling_factor", _FLOAT32, _ONE)
    yield Part("activation_scaling_factor", _FLOAT32, _ONE)


def _int8_scales(
    own: ModuleScheme, rows: int, columns: int, dtype: np.dtype[Any], is_row_split: bool
) -> Iterator[Part]:
    if own.algorithm == "W8A8_SQ_PER_CHANNEL":
        yield Part("weights_scaling_factor", _FLOAT32, (rows,))
        yield Part("activation_scaling_factor", _FLOAT32, _ONE)
        yield Part("prequant_scaling_factor", dtype, (columns,))
        return
    yield Part("per_channel_scale", _FLOAT32, (1, rows))
    if own.algorithm == SQ_PLUGIN:
        yield Part("act_scale", _FLOAT32, (1, 1))
    if is_row_split:
        yield Part("smoother", _FLOAT32, (1, columns))
