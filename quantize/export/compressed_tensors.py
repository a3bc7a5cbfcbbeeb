"""The layout of compressed-tensors, which vLLM and SGLang load, and TensorRT-LLM in part.

https://github.com/vllm-project/compressed-tensors, version 0.20.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantize.export.compressed_tensors_schemes import arguments, layout_of, pack_weight, weight_specs
from quantize.export.experts import router_modules
from quantize.export.hf_tensors import hf_tensors
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.writing import PlannedTensors
from quantize.safetensors_writer import TensorSpec

LIBRARY_VERSION = "0.20.1"  # whose configuration this is
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def plan(source: ExportSource) -> list[PlannedTensors]:
    """Every tensor of the checkpoint."""
    return list(
        hf_tensors(
            source,
            lambda name, linear: weight_specs(name, linear, source.schemes[name], source.dtype),
            lambda name, weight: pack_weight(name, weight, source.dtype),
            _kv_spec,
        )
    )


def config(source: ExportSource) -> dict[str, Any]:
    """quantization_config as the library's ModelCompressor.update_config writes it."""
    schemes = source.quantized_schemes
    layouts = list(dict.fromkeys(layout_of(scheme) for scheme in schemes))
    groups = {
        f"group_{number}": _group(scheme, _targets(source, scheme) if len(schemes) > 1 else ["Linear"])
        for number, scheme in enumerate(schemes)
    }
    return {
        "version": LIBRARY_VERSION,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
        "kv_cache_scheme": None if source.kv_cache is None else _KV_SCHEME,
        "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head", *router_modules(source), *source.unquantized_modules],
        "moe_sparsity_config": None,
    }


def _group(scheme: LinearScheme, targets: list[str]) -> dict[str, Any]:
    weights, inputs = arguments(scheme)
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": layout_of(scheme),
    }


def _targets(source: ExportSource, scheme: LinearScheme) -> list[str]:
    """Full module names: patterns are read differently by different loaders."""
    return [name.removesuffix(".weight") for name, own in source.schemes.items() if own == scheme]


def _kv_spec(scale: str) -> TensorSpec:
    """k_scale and v_scale belong to the attention module here, not to the linear."""
    module, _, name = scale.rpartition(".")
    return TensorSpec(f"{module.rpartition('.')[0]}.{name}", np.dtype(np.float32), (1,))
