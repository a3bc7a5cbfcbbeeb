"""config.json of a TensorRT-LLM unified checkpoint (1.2).

Sources: tensorrt_llm/models/llama/config.py, models/qwen/config.py and models/modeling_utils.py.
"""

from __future__ import annotations

import math
from typing import Any

from plansmith_errors import ExportError
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import EXCLUDED
from quantize.parallel import Mapping

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "QWenForCausalLM"}
_GPUS_PER_NODE = 8
_MISTRAL_SLIDING_WINDOW = 4096  # of transformers' MistralConfig, where the key is absent
_ROPE_TYPES = ("default", "linear", "llama3")


def unified_config(source: ExportSource, mapping: Mapping) -> dict[str, Any]:
    """Raises ExportError for a model that the run-time would compute otherwise."""
    config, shape = source.checkpoint.config, source.shape
    check_attention_window(config)
    base, scaling = rotary(config)
    unified: dict[str, Any] = {
        "architecture": ARCHITECTURES[shape.model_type],
        "dtype": source.dtype.name,
        "logits_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_size": shape.head_dim,
        "hidden_act": _hidden_act(config),
        "norm_epsilon": _number("rms_norm_eps", config.get("rms_norm_eps") or 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": max_positions(config),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "qk_layernorm": False,
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.is_tied,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": _mapping(mapping),
        "quantization": quantization(source.scheme),
    }
    if shape.model_type == "qwen2":
        # Read without a default when the network is made.
        unified |= {"qwen_type": "qwen2", "seq_length": max_positions(config), "use_logn_attn": False}
        unified |= {"moe_intermediate_size": 0, "moe_shared_expert_intermediate_size": 0}
    return unified


def quantization(scheme: LinearScheme) -> dict[str, Any]:
    """Only keys that the loader knows: another one is an error there. ``exclude_modules`` is never null nor empty, for
    which releases differ in what they exclude."""
    algorithm = {"int4": "W4A16_AWQ", "fp8": "FP8_PER_CHANNEL_PER_TOKEN", "none": None}[scheme.name]
    found: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if scheme.name == "int4":
        found |= {"group_size": scheme.group_size, "has_zero_point": False, "pre_quant_scale": False}
    return found | {"exclude_modules": list(EXCLUDED)}


def rotary(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from every place where a config may keep them. Raises ExportError."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ExportError(f"config.json: rope_scaling is {scaling!r}, expected a mapping")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ExportError(
            f"config.json: rope type {kind!r} is not known to load as meant; known: {', '.join(_ROPE_TYPES)}"
        )
    base = _number("rope_theta", scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return base, None
    parameters = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type", "rope_type")}
    return base, {**parameters, "type": kind, "rope_type": kind}


def max_positions(config: dict[str, Any]) -> int:
    """The longest sequence, in tokens. Raises ExportError."""
    value = config.get("max_position_embeddings")
    if type(value) is not int or value < 1:
        raise ExportError(f"config.json: max_position_embeddings is {value!r}, expected a positive integer")
    return value


def check_attention_window(config: dict[str, Any]) -> None:
    """Refuse a sliding window, which the checkpoint cannot say. Raises ExportError."""
    family = config.get("model_type")
    slides = family == "mistral" or (family == "qwen2" and config.get("use_sliding_window"))
    window = config.get("sliding_window", _MISTRAL_SLIDING_WINDOW)
    if not slides or window is None:
        return
    if type(window) is not int or window < max_positions(config):
        raise ExportError(
            f"config.json: attention slides over {window!r} tokens of {max_positions(config)}, which a unified "
            f"checkpoint cannot say; set max_position_embeddings to {window!r} and sliding_window to null to serve "
            "up to that length"
        )


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ExportError(f"config.json: {key} is {value!r}, expected a positive number")
    return value


def _hidden_act(config: dict[str, Any]) -> str:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ExportError(f"config.json: hidden_act is {activation!r}, expected silu")
    return "silu"


def _mapping(mapping: Mapping) -> dict[str, int]:
    return {
        "world_size": mapping.world_size,
        "gpus_per_node": _GPUS_PER_NODE,
        "cp_size": 1,
        "tp_size": mapping.tp_size,
        "pp_size": mapping.pp_size,
        "moe_tp_size": mapping.tp_size,
        "moe_ep_size": 1,
    }
