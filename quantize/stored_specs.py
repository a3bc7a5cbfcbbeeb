"""Types and shapes of the tensors that a matrix is stored as, by its rule: what docs/quantized-checkpoint.md lists."""

from __future__ import annotations

import numpy as np

from plansmith_errors import QuantizeError
from quantize.activations import KvScheme, input_scale_name, kv_scale_name, pre_quant_scale_name
from quantize.checkpoint import TensorInfo
from quantize.dtypes import FLOAT8_E4M3
from quantize.safetensors_writer import TensorSpec
from quantize.weight_rule import (
    BLOCK_SIZES,
    FP8_BLOCK,
    GROUP_SIZES,
    Granularity,
    InputSettings,
    Int4Settings,
    WeightRule,
)

Specs = tuple[TensorSpec, ...]

_FLOAT32, _UINT8, _INT8 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int8)


def stored_specs(info: TensorInfo, rule: WeightRule, kept_dtype: np.dtype[np.generic]) -> Specs:
    """The matrix ``info`` and what belongs to it. Raises QuantizeError when a group or block does not divide it."""
    name, shape = info.name, (info.shape[0], info.shape[1])
    if rule.scheme == "none":
        return (TensorSpec(name, kept_dtype, shape),)
    if rule.int4 is not None:
        return _int4(name, shape, rule.int4.for_columns(shape[1]))
    if rule.floats is None:
        return TensorSpec(name, _INT8, shape), TensorSpec(f"{name}_scale", _FLOAT32, (shape[0], 1))
    if rule.scheme == "fp8":
        scales = fp8_scale_shape(shape, rule.floats.granularity)
        return TensorSpec(name, FLOAT8_E4M3, shape), TensorSpec(f"{name}_scale", _FLOAT32, scales)
    return _blocks(name, shape, rule.scheme)


def companion_specs(info: TensorInfo, inputs: InputSettings | None, kv_cache: KvScheme | None) -> Specs:
    """What is stored of a linear's inputs, and of keys or values, in this order."""
    specs = []
    if inputs is not None and inputs.activations.scale == "static":
        specs.append(TensorSpec(input_scale_name(info.name), _FLOAT32, ()))
    if inputs is not None and inputs.smoothing is not None and not inputs.fold_smoothing:
        specs.append(TensorSpec(pre_quant_scale_name(info.name), _FLOAT32, info.shape[1:]))
    kv_scale = kv_scale_name(info.name)
    if kv_cache is not None and kv_scale is not None:
        specs.append(TensorSpec(kv_scale, _FLOAT32, ()))
    return tuple(specs)


def fp8_scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...]:
    """Shape of the scales of an fp8 matrix [out, in]."""
    rows, columns = shape
    if granularity == "tensor":
        return ()
    return (rows, 1) if granularity == "channel" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def _int4(name: str, shape: tuple[int, int], int4: Int4Settings) -> Specs:
    rows, columns = shape
    _check_group(name, columns, int4.group_size)
    groups = (rows, columns // int4.group_size)
    specs = (TensorSpec(name, _UINT8, (rows, columns // 2)), TensorSpec(f"{name}_scale", _FLOAT32, groups))
    return specs if int4.symmetric else (*specs, TensorSpec(f"{name}_zero_point", _UINT8, groups))


def _blocks(name: str, shape: tuple[int, int], scheme: str) -> Specs:
    rows, columns = shape
    size = BLOCK_SIZES[scheme]
    _check_block(name, columns, scheme, size)
    blocks = (rows, columns // size)
    if scheme == "mxfp8":
        return TensorSpec(name, FLOAT8_E4M3, shape), TensorSpec(f"{name}_scale", _UINT8, blocks)
    values = TensorSpec(name, _UINT8, (rows, columns // 2))
    if scheme == "mxfp4":
        return values, TensorSpec(f"{name}_scale", _UINT8, blocks)
    return values, TensorSpec(f"{name}_scale", FLOAT8_E4M3, blocks), TensorSpec(f"{name}_scale_2", _FLOAT32, ())


def _check_group(name: str, columns: int, group_size: int) -> None:
    if columns % 2:
        raise QuantizeError(
            f"tensor {name!r} has {columns} input columns, an odd number, and int4 packs columns in pairs; "
            "give this tensor int8 or fp8 through overrides"
        )
    if columns % group_size == 0:
        return
    fitting = [str(size) for size in GROUP_SIZES if columns % size == 0]
    advice = (
        f"group sizes that do: {', '.join(fitting)}"
        if fitting
        else f"none of {', '.join(map(str, GROUP_SIZES))} does; give this tensor int8 or fp8 through overrides, "
        "or use group_size channel"
    )
    raise QuantizeError(
        f"tensor {name!r} has {columns} input columns, which group_size {group_size} does not divide; {advice}"
    )


def _check_block(name: str, columns: int, scheme: str, size: int) -> None:
    if columns % size == 0:
        return
    fitting = [f"{other} (blocks of {block})" for other, block in BLOCK_SIZES.items() if columns % block == 0]
    raise QuantizeError(
        f"tensor {name!r} has {columns} input columns, which {scheme}'s blocks of {size} do not divide; "
        f"give this tensor {', '.join([*fitting, 'int8 or fp8'])} through overrides"
    )
