"""ModelOpt's Hugging Face layout, which TensorRT-LLM 1.3 and later and vLLM load.

https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export: unified_export_hf.py and convert_hf_config.py.
"""

from __future__ import annotations

from typing import Any

from quantize.export.hf_tensors import hf_tensors
from quantize.export.modelopt_schemes import layer_config, pack_weight, weight_specs
from quantize.export.source import ExportSource
from quantize.export.writing import PlannedTensors

_PRODUCER = {"name": "modelopt"}  # by this name loaders recognise the layout
_KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def plan(source: ExportSource) -> list[PlannedTensors]:
    """Every tensor of the checkpoint."""
    return list(hf_tensors(source, lambda name, linear: weight_specs(name, linear, source.schemes[name]), pack_weight))


def quant_config(source: ExportSource) -> dict[str, Any]:
    """hf_quant_config.json"""
    quantization: dict[str, Any] = {"kv_cache_quant_algo": source.kv_cache and source.kv_cache.upper()}
    if len(source.quantized_schemes) == 1:
        quantization |= layer_config(source.quantized_schemes[0])
    else:
        quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": _layers(source)}
    quantization["exclude_modules"] = ["lm_head", *source.unquantized_modules]
    return {"producer": _PRODUCER, "quantization": quantization}


def config(source: ExportSource) -> dict[str, Any]:
    """quantization_config of config.json, which vLLM reads in place of hf_quant_config.json."""
    quantization = quant_config(source)["quantization"]
    ignored = quantization.pop("exclude_modules")
    kv_cache = {} if source.kv_cache is None else {"kv_cache_scheme": _KV_SCHEME}
    return {"ignore": ignored, **quantization, **kv_cache, "producer": _PRODUCER, "quant_method": "modelopt"}


def _layers(source: ExportSource) -> dict[str, dict[str, Any]]:
    """The scheme of every quantized module, by name."""
    return {
        name.removesuffix(".weight"): layer_config(scheme)
        for name, scheme in source.schemes.items()
        if scheme.name != "none"
    }
