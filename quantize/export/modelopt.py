"""ModelOpt's Hugging Face layout, which TensorRT-LLM 1.3 and later load: W4A16_AWQ and FP8_PER_CHANNEL_PER_TOKEN.

https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export: unified_export_hf.py and convert_hf_config.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.dtypes import FLOAT8_E4M3
from quantize.export.casting import required_scales
from quantize.export.hf_tensors import hf_tensors
from quantize.export.int4_rows import pack_rows
from quantize.export.source import ExportSource
from quantize.export.writing import PlannedTensors
from quantize.model_shape import Linear
from quantize.quantized_tensor import QuantizedTensor
from quantize.safetensors_writer import TensorSpec

_ALGORITHMS = {"int4": "W4A16_AWQ", "fp8": "FP8_PER_CHANNEL_PER_TOKEN"}
_PRODUCER = {"name": "modelopt"}  # by this name loaders recognise the layout
_FLOAT32 = np.dtype(np.float32)


def plan(source: ExportSource) -> list[PlannedTensors]:
    """Every tensor of the checkpoint."""
    return list(hf_tensors(source, lambda name, linear: _specs(source, name, linear), _pack))


def _specs(source: ExportSource, name: str, linear: Linear) -> tuple[TensorSpec, ...]:
    rows, columns, group = linear.out_features, linear.in_features, source.scheme.group_size
    if group is None:
        return (TensorSpec(name, FLOAT8_E4M3, (rows, columns)), TensorSpec(f"{name}_scale", _FLOAT32, (rows,)))
    return (
        TensorSpec(name, np.dtype(np.uint8), (rows // 2, columns)),
        TensorSpec(f"{name}_scale", _FLOAT32, (rows, columns // group)),
    )


def _pack(name: str, weight: QuantizedTensor) -> list[npt.NDArray[Any]]:
    scales = required_scales(name, weight).astype(np.float32)
    if weight.scheme == "fp8":
        return [weight.values, scales.reshape(-1)]
    return [pack_rows(weight.unpacked()), scales]


def quant_config(source: ExportSource) -> dict[str, Any]:
    """hf_quant_config.json"""
    quantization: dict[str, Any] = {"quant_algo": _ALGORITHMS[source.scheme.name], "kv_cache_quant_algo": None}
    if source.scheme.group_size is not None:
        quantization |= {"group_size": source.scheme.group_size, "has_zero_point": False, "pre_quant_scale": False}
    quantization["exclude_modules"] = ["lm_head", *source.unquantized_modules]
    return {"producer": _PRODUCER, "quantization": quantization}


def config(source: ExportSource) -> dict[str, Any]:
    """quantization_config of config.json, which vLLM reads in place of hf_quant_config.json."""
    quantization = quant_config(source)["quantization"]
    ignored = quantization.pop("exclude_modules")
    return {"ignore": ignored, **quantization, "producer": _PRODUCER, "quant_method": "modelopt"}
