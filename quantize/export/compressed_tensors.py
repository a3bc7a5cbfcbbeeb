"""The layout of compressed-tensors, which vLLM and SGLang load: pack-quantized (int4, int8) and float-quantized (fp8).

https://github.com/vllm-project/compressed-tensors, version 0.20: compressors/pack_quantized and naive_quantized.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.dtypes import FLOAT8_E4M3
from quantize.export.casting import cast_scales, required_scales
from quantize.export.experts import router_modules
from quantize.export.hf_tensors import hf_tensors
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.writing import PlannedTensors
from quantize.model_shape import Linear
from quantize.quantized_tensor import QuantizedTensor
from quantize.safetensors_writer import TensorSpec

LIBRARY_VERSION = "0.20.1"  # whose configuration this is
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


def plan(source: ExportSource) -> list[PlannedTensors]:
    """Every tensor of the checkpoint."""
    return list(
        hf_tensors(
            source, lambda name, linear: _specs(source, name, linear), lambda name, weight: _pack(source, name, weight)
        )
    )


def _specs(source: ExportSource, name: str, linear: Linear) -> tuple[TensorSpec, ...]:
    scheme, rows, columns = source.scheme, linear.out_features, linear.in_features
    if scheme.name == "fp8":
        # Scales stay float32: the library would round them to the model's type, and loaders widen them again.
        return (TensorSpec(name, FLOAT8_E4M3, (rows, columns)), TensorSpec(f"{name}_scale", _FLOAT32, (rows, 1)))
    per_word = 8 if scheme.name == "int4" else 4
    groups = 1 if scheme.group_size is None else columns // scheme.group_size
    specs = (
        TensorSpec(f"{name}_packed", _INT32, (rows, -(-columns // per_word))),
        TensorSpec(f"{name}_scale", source.dtype, (rows, groups)),
        TensorSpec(f"{name}_shape", _INT64, (2,)),
    )
    if scheme.symmetric:
        return specs
    return (*specs, TensorSpec(f"{name}_zero_point", _INT32, (-(-rows // per_word), groups)))


def _pack(source: ExportSource, name: str, weight: QuantizedTensor) -> list[npt.NDArray[Any]]:
    scales = required_scales(name, weight)
    if weight.scheme == "fp8":
        return [weight.values, scales]
    # Both formats begin with the first column in the lowest bits, and store a symmetric value as unsigned.
    unsigned = weight.values if weight.scheme == "int4" else (weight.values.view(np.uint8) ^ np.uint8(0x80))
    packed = _words(unsigned)
    parts = [packed, cast_scales(f"{name}_scale", scales, source.dtype), np.array(weight.shape, np.int64)]
    if weight.zero_points is not None:
        parts.append(_pack_zero_points(weight.zero_points))
    return parts


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


def config(source: ExportSource) -> dict[str, Any]:
    """quantization_config as the library's ModelCompressor.update_config writes it."""
    layout = "float-quantized" if source.scheme.name == "fp8" else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": _weight_arguments(source.scheme),
        "input_activations": _TOKEN_ACTIVATIONS if source.scheme.name == "fp8" else None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "version": LIBRARY_VERSION,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head", *router_modules(source), *source.unquantized_modules],
        "moe_sparsity_config": None,
    }


def _weight_arguments(scheme: LinearScheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_bits": 4 if scheme.name == "int4" else 8,
        "type": "float" if scheme.name == "fp8" else "int",
        "symmetric": scheme.symmetric,
        "group_size": scheme.group_size,
        "strategy": "group" if scheme.name == "int4" else "channel",
        "dynamic": False,
        "observer": "memoryless_minmax",
    }
    return arguments if scheme.symmetric else arguments | {"zp_dtype": "torch.int8"}


_TOKEN_ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "strategy": "token",
    "dynamic": True,
}
