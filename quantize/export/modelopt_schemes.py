"""What ModelOpt calls each scheme, and how it stores one linear: hf_quant_config.json's quant_algo, types and shapes.

https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export (0.47); held against its own exports by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.activations import Activations, input_scale_name, pre_quant_scale_name
from quantize.dtypes import FLOAT8_E4M3
from quantize.export.casting import required_scales
from quantize.export.int4_rows import pack_rows
from quantize.export.scheme import LinearScheme
from quantize.float8 import E4M3_MAX
from quantize.model_shape import Linear
from quantize.quantized_tensor import QuantizedTensor
from quantize.safetensors_writer import TensorSpec
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK

_FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
_ALGORITHMS: dict[tuple[str, str | None], str] = {  # weights, inputs
    ("int4", None): "W4A16_AWQ",
    ("int4", "static fp8"): "W4A8_AWQ",
    ("fp8 channel", None): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8 channel", "token fp8"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8 tensor", "static fp8"): "FP8",
    ("fp8 block", None): "fp8_pb_wo",
    ("int8", None): "W8A16",
    ("int8", "static int8"): "W8A8_SQ_PER_CHANNEL",
    ("nvfp4", "static nvfp4"): "NVFP4",
    ("mxfp4", None): "mxfp4",
    ("mxfp8", None): "MXFP8",
}


def algorithm(scheme: LinearScheme) -> str | None:
    """quant_algo; None for a scheme that has no name there."""
    weights = f"fp8 {scheme.granularity}" if scheme.name == "fp8" else scheme.name
    inputs = scheme.activations
    if not scheme.symmetric:
        return None
    return _ALGORITHMS.get((weights, None if inputs is None else f"{inputs.scale} {inputs.scheme}"))


def layer_config(scheme: LinearScheme) -> dict[str, Any]:
    """What the configuration says of a layer of this scheme."""
    name = algorithm(scheme)
    if scheme.name == "int4":
        group = {"group_size": scheme.group_size, "has_zero_point": False}
        return {"quant_algo": name, **group, "pre_quant_scale": scheme.has_pre_quant_scale}
    if scheme.name in ("nvfp4", "mxfp8"):
        return {"quant_algo": name, "group_size": BLOCK_SIZES[scheme.name]}
    return {"quant_algo": name}


def weight_specs(name: str, linear: Linear, scheme: LinearScheme) -> tuple[TensorSpec, ...]:
    """Of the weight ``name``, of its scales and of what belongs to its inputs."""
    specs = list(_stored(name, linear.out_features, linear.in_features, scheme))
    if algorithm(scheme) == "W4A8_AWQ":
        specs.append(TensorSpec(f"{name}_scale_2", _FLOAT32, ()))
    if scheme.activations is not None and scheme.activations.scale == "static":
        specs.append(TensorSpec(input_scale_name(name), _FLOAT32, ()))
    if scheme.has_pre_quant_scale:
        specs.append(TensorSpec(pre_quant_scale_name(name), _FLOAT32, (linear.in_features,)))
    return tuple(specs)


def _stored(name: str, rows: int, columns: int, scheme: LinearScheme) -> tuple[TensorSpec, ...]:
    if scheme.name == "int4":
        groups = (rows, columns // (scheme.group_size or columns))
        return TensorSpec(name, _UINT8, (rows // 2, columns)), TensorSpec(f"{name}_scale", _FLOAT32, groups)
    if scheme.name in ("int8", "fp8"):
        dtype = np.dtype(np.int8) if scheme.name == "int8" else FLOAT8_E4M3
        blocks = (-(-rows // FP8_BLOCK), 1, -(-columns // FP8_BLOCK), 1)
        shape: tuple[int, ...] = {"tensor": (), "block": blocks}.get(scheme.granularity, (rows,))
        return TensorSpec(name, dtype, (rows, columns)), TensorSpec(f"{name}_scale", _FLOAT32, shape)
    blocks_shape = (rows, columns // BLOCK_SIZES[scheme.name])
    if scheme.name == "mxfp8":
        return TensorSpec(name, FLOAT8_E4M3, (rows, columns)), TensorSpec(f"{name}_scale", _UINT8, blocks_shape)
    values = TensorSpec(name, _UINT8, (rows, columns // 2))
    if scheme.name == "mxfp4":
        return values, TensorSpec(f"{name}_scale", _UINT8, blocks_shape)
    block_scales = TensorSpec(f"{name}_scale", FLOAT8_E4M3, blocks_shape)
    return values, block_scales, TensorSpec(f"{name}_scale_2", _FLOAT32, ())


def pack_weight(name: str, weight: QuantizedTensor) -> list[npt.NDArray[Any]]:
    """Arrays in the order of ``weight_specs``."""
    scales = required_scales(name, weight)
    parts: list[npt.NDArray[Any]]
    if weight.scheme == "int4":
        parts = [pack_rows(weight.unpacked()), scales.astype(np.float32)]
        if weight.activations is not None:
            parts.append(np.array(np.abs(weight.dequantize()).max() / np.float32(E4M3_MAX), np.float32))
    elif weight.scheme in ("int8", "fp8"):
        parts = [weight.values, _scales_of_bytes(scales, weight.shape)]
    else:
        parts = [weight.values, scales]
    beside = (weight.tensor_scale, weight.input_scale, weight.pre_quant_scale)
    return [*parts, *(part for part in beside if part is not None)]


def _scales_of_bytes(scales: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if scales.ndim == 0:
        return scales
    return scales.reshape(-1) if scales.shape == (shape[0], 1) else scales[:, None, :, None]


def scheme_named(config: Mapping[str, Any]) -> LinearScheme | None:
    """The scheme that ``layer_config`` describes; None for a quant_algo that is not known here."""
    name = config.get("quant_algo")
    for (weights, inputs), known in _ALGORITHMS.items():
        if isinstance(name, str) and name.lower() == known.lower():
            scheme, _, granularity = weights.partition(" ")
            scale, _, kind = (inputs or "").partition(" ")
            group = config.get("group_size") if scheme == "int4" else BLOCK_SIZES.get(scheme)
            activations = Activations(kind, scale) if inputs else None  # type: ignore[arg-type] # of the table above
            return LinearScheme(scheme, group, True, granularity or "channel", activations)
    return None
