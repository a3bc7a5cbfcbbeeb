"""config.json of a TensorRT-LLM unified checkpoint (1.2), and quant_cfg.json beside it.

Sources: tensorrt_llm/models/llama/config.py, models/qwen/{config,model}.py, models/modeling_utils.py and layers/moe.py.
"""

from __future__ import annotations

import math
from typing import Any

from plansmith_errors import ExportError
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import EXCLUDED
from quantize.export.trtllm_modules import ModulePlan
from quantize.export.trtllm_schemes import MIXED_PRECISION
from quantize.mixture import Mixture
from quantize.model_shape import ModelShape
from quantize.parallel import Mapping

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "QWenForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_RENORMALIZE, _NO_NORMALIZATION = 1, 0  # MoeConfig.ExpertScaleNormalizationMode
_GPUS_PER_NODE = 8
_MISTRAL_SLIDING_WINDOW = 4096  # of transformers' MistralConfig, where the key is absent
_ROPE_TYPES = ("default", "linear", "llama3")


def unified_config(source: ExportSource, mapping: Mapping, plan: ModulePlan) -> dict[str, Any]:
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
        "hidden_act": _hidden_act(config, shape.mixture),
        "norm_epsilon": _number("rms_norm_eps", config.get("rms_norm_eps") or 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": max_positions(config),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "qk_layernorm": shape.qk_norm,
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.is_tied,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": _mapping(mapping),
        "quantization": quantization(plan, source.kv_cache),
    }
    if shape.model_type.startswith("qwen"):
        # Read without a default when the network is made.
        unified |= {"qwen_type": shape.model_type, "seq_length": max_positions(config), "use_logn_attn": False}
        moe_size = 0 if shape.mixture is None else shape.mixture.intermediate_size
        unified |= {"moe_intermediate_size": moe_size, "moe_shared_expert_intermediate_size": 0}
    return unified | _experts(shape)


def quantization(plan: ModulePlan, kv_cache: str | None) -> dict[str, Any]:
    """Only keys that the loader knows: another one is an error there. ``exclude_modules`` is never null nor empty, for
    which releases differ in what they exclude."""
    found: dict[str, Any] = {"quant_algo": plan.algorithm, "kv_cache_quant_algo": kv_cache and kv_cache.upper()}
    if plan.algorithm == MIXED_PRECISION:
        return found
    if plan.quantized:
        found |= plan.quantized[0].entry()
    return found | {"exclude_modules": [*EXCLUDED, *plan.excluded]}


def layer_quantization(plan: ModulePlan, kv_cache: str | None) -> dict[str, Any] | None:
    """quant_cfg.json, which only a mix of schemes has."""
    if plan.algorithm != MIXED_PRECISION:
        return None
    layers = {name: own.entry() for name, own in plan.schemes.items() if own.algorithm is not None}
    return {**quantization(plan, kv_cache), "quantized_layers": layers}


def _experts(shape: ModelShape) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {}
    mode = _RENORMALIZE if mixture.normalizes else _NO_NORMALIZATION
    return {
        "moe": {
            "num_experts": mixture.num_experts,
            "top_k": mixture.experts_per_token,
            "normalization_mode": mode,
        }
    }


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
    family = str(config.get("model_type"))
    slides = family in ("mistral", "mixtral") or (family.startswith("qwen") and config.get("use_sliding_window"))
    window = config.get("sliding_window", None if family == "mixtral" else _MISTRAL_SLIDING_WINDOW)
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


def _hidden_act(config: dict[str, Any], mixture: Mixture | None) -> str:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ExportError(f"config.json: hidden_act is {activation!r}, expected silu")
    return "silu" if mixture is None else "swiglu"  # of experts it says that they are gated, too


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
