"""How compressed-tensors stores one linear of each scheme, and the arguments that describe it.

https://github.com/vllm-project/compressed-tensors, version 0.20: compressors/ and quantization/quant_scheme.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quantize.activations import Activations, ActivationScale, input_scale_name
from quantize.dtypes import FLOAT8_E4M3
from quantize.export.casting import cast_scales, required_scales
from quantize.export.scheme import LinearScheme
from quantize.model_shape import Linear
from quantize.quantized_tensor import QuantizedTensor
from quantize.safetensors_writer import TensorSpec
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK

Layout = Literal["pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"]
Array = npt.NDArray[Any]

_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
_UINT8, _INT8 = np.dtype(np.uint8), np.dtype(np.int8)


def layout_of(scheme: LinearScheme) -> Layout | None:
    """The name of the layout; None for a scheme that has none."""
    inputs = scheme.activations
    if scheme.has_pre_quant_scale or scheme.name in ("mxfp8", "none"):
        return None
    if scheme.name == "fp8":
        # With one scale for the matrix, the library's kernels want one for the inputs as well.
        is_static = inputs is not None and inputs.scale == "static"
        return "float-quantized" if is_static or scheme.granularity != "tensor" else None
    if scheme.name == "int8":
        return "pack-quantized" if inputs is None else "int-quantized"
    if scheme.name == "int4":
        return "pack-quantized" if inputs is None else None
    return "nvfp4-pack-quantized" if scheme.name == "nvfp4" else "mxfp4-pack-quantized"


def weight_specs(name: str, linear: Linear, scheme: LinearScheme, dtype: np.dtype[Any]) -> tuple[TensorSpec, ...]:
    """Of the weight ``name``, of its scales and of those of its inputs. ``dtype``: of what is not quantized."""
    rows, columns, layout = linear.out_features, linear.in_features, layout_of(scheme)
    if layout == "pack-quantized":
        return _packed_specs(name, rows, columns, scheme, dtype)
    if layout in ("int-quantized", "float-quantized"):
        # Scales stay float32: the library would round them to the model's type, and loaders widen them again.
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        shape = {"tensor": (1,), "block": blocks}.get(scheme.granularity, (rows, 1))
        values = TensorSpec(name, _INT8 if scheme.name == "int8" else FLOAT8_E4M3, (rows, columns))
        specs = [values, TensorSpec(f"{name}_scale", _FLOAT32, shape)]
        if scheme.activations is not None and scheme.activations.scale == "static":
            specs.append(TensorSpec(input_scale_name(name), _FLOAT32, (1,)))
        return tuple(specs)
    blocks = (rows, columns // BLOCK_SIZES[scheme.name])
    packed = TensorSpec(f"{name}_packed", _UINT8, (rows, columns // 2))
    if layout == "mxfp4-pack-quantized":
        return packed, TensorSpec(f"{name}_scale", _UINT8, blocks)
    specs = [packed, TensorSpec(f"{name}_scale", FLOAT8_E4M3, blocks)]
    specs.append(TensorSpec(f"{name}_global_scale", _FLOAT32, (1,)))
    if scheme.activations is not None:
        specs.append(TensorSpec(_input_global_scale(name), _FLOAT32, (1,)))
    return tuple(specs)


def pack_weight(name: str, weight: QuantizedTensor, dtype: np.dtype[Any]) -> list[Array]:
    """Arrays in the order of ``weight_specs``."""
    scales = required_scales(name, weight)
    if weight.tensor_scale is not None:
        # Its global scales divide, where ours multiply.
        inverses = [weight.tensor_scale] + ([] if weight.input_scale is None else [weight.input_scale])
        return [weight.values, scales, *((1 / value).astype(np.float32).reshape(1) for value in inverses)]
    if weight.scheme == "mxfp4":
        return [weight.values, scales]
    if weight.scheme == "fp8" or weight.activations is not None:
        parts = [weight.values, scales.reshape(1) if scales.ndim == 0 else scales]
        return parts if weight.input_scale is None else [*parts, weight.input_scale.reshape(1)]
    # Both formats begin with the first column in the lowest bits, and store a symmetric value as unsigned.
    unsigned = weight.values if weight.scheme == "int4" else (weight.values.view(np.uint8) ^ np.uint8(0x80))
    parts = [_words(unsigned), cast_scales(f"{name}_scale", scales, dtype), np.array(weight.shape, np.int64)]
    return parts if weight.zero_points is None else [*parts, _pack_zero_points(weight.zero_points)]


def arguments(scheme: LinearScheme) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """QuantizationArgs of the weights, and of the inputs; None: they stay floats."""
    return _weight_arguments(scheme), _input_arguments(scheme)


def _packed_specs(
    name: str, rows: int, columns: int, scheme: LinearScheme, dtype: np.dtype[Any]
) -> tuple[TensorSpec, ...]:
    per_word = 8 if scheme.name == "int4" else 4
    groups = 1 if scheme.group_size is None else columns // scheme.group_size
    specs = (
        TensorSpec(f"{name}_packed", _INT32, (rows, -(-columns // per_word))),
        TensorSpec(f"{name}_scale", dtype, (rows, groups)),
        TensorSpec(f"{name}_shape", _INT64, (2,)),
    )
    if scheme.symmetric:
        return specs
    return (*specs, TensorSpec(f"{name}_zero_point", _INT32, (-(-rows // per_word), groups)))


def _weight_arguments(scheme: LinearScheme) -> dict[str, Any]:
    strategy = {"int4": "group", "nvfp4": "tensor_group", "mxfp4": "group"}.get(scheme.name, scheme.granularity)
    found: dict[str, Any] = {
        "num_bits": 8 if scheme.name in ("int8", "fp8") else 4,
        "type": "int" if scheme.name.startswith("int") else "float",
        "symmetric": scheme.symmetric,
        "group_size": BLOCK_SIZES.get(scheme.name, scheme.group_size),
        "strategy": strategy,
        "dynamic": False,
        "observer": "memoryless_minmax",
    }
    if strategy == "block":
        found["block_structure"] = [FP8_BLOCK, FP8_BLOCK]
    if scheme.name == "nvfp4":
        found["scale_dtype"] = "torch.float8_e4m3fn"
    if scheme.name == "mxfp4":
        found["scale_dtype"] = "torch.uint8"
    return found if scheme.symmetric else found | {"zp_dtype": "torch.int8"}


def _input_arguments(scheme: LinearScheme) -> dict[str, Any] | None:
    inputs = scheme.activations
    if scheme.name == "nvfp4" and inputs is not None:
        kind = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
        return {**kind, "symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
    if scheme.name == "fp8" and scheme.granularity == "block":
        kind = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True}
        return {**kind, "symmetric": True}
    if scheme.name == "fp8" or inputs is not None:
        is_static = inputs is not None and inputs.scale == "static"
        strategy, kind_name = ("tensor" if is_static else "token"), ("int" if scheme.name == "int8" else "float")
        base = {"num_bits": 8, "type": kind_name, "symmetric": True, "group_size": None}
        return {**base, "strategy": strategy, "dynamic": not is_static}
    return None


def _input_global_scale(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.input_global_scale"


def _pack_zero_points(zeros: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Values 0..15 [out, groups] to int32 [ceil(out / 8), groups]: eight outputs in a word, the first lowest."""
    padded = np.pad(zeros, ((0, -len(zeros) % 8), (0, 0))).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[None, :, None]
    words: npt.NDArray[np.uint32] = np.bitwise_or.reduce(padded.reshape(-1, 8, zeros.shape[1]) << shifts, axis=1)
    return words.view(np.int32)


def _words(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Bytes [out, n] to little-endian int32 [out, ceil(n / 4)]."""
    missing = -values.shape[1] % 4
    return np.pad(values, ((0, 0), (0, missing))).view(np.int32)


def scheme_described(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> LinearScheme | None:
    """The scheme whose ``arguments`` these are; None where it is not known here."""
    kind = tuple(weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    if not all(isinstance(part, int | str | None) for part in kind):
        return None
    found = _DESCRIBED.get(kind[:3]) or _DESCRIBED.get(kind)
    if found is None:
        return None
    name, granularity = found
    group = weights.get("group_size") if name == "int4" else BLOCK_SIZES.get(name)
    symmetric = name != "int4" or weights.get("symmetric") is not False
    return LinearScheme(name, group, symmetric, granularity, _described_inputs(name, granularity, inputs))


_DESCRIBED: dict[tuple[Any, ...], tuple[str, str]] = {
    (4, "int", "group"): ("int4", "channel"),
    (8, "int", "channel"): ("int8", "channel"),
    (8, "float", "channel"): ("fp8", "channel"),
    (8, "float", "tensor"): ("fp8", "tensor"),
    (8, "float", "block"): ("fp8", "block"),
    (4, "float", "tensor_group"): ("nvfp4", "channel"),
    (4, "float", "group", 32): ("mxfp4", "channel"),
}


def _described_inputs(name: str, granularity: str, inputs: Mapping[str, Any] | None) -> Activations | None:
    if inputs is None or granularity == "block":
        return None
    if name == "nvfp4":
        return Activations("nvfp4", "static")
    scale: ActivationScale = "token" if inputs.get("dynamic") else "static"
    if name == "fp8":
        return Activations("fp8", scale)
    return Activations("int8", scale) if name == "int8" else None
