"""config.json of a TensorRT-LLM unified checkpoint, anyone's: the model, the cut and the quantization it describes."""

from __future__ import annotations

from collections.abc import Mapping as ReadMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from plansmith_errors import CheckpointError
from quantize.export.casting import DTYPES
from quantize.lint.finding import Finding
from quantize.model_shape import LARGEST, ModelShape
from quantize.parallel import Mapping

ALGORITHMS = (None, "W4A16_AWQ", "FP8_PER_CHANNEL_PER_TOKEN", "FP8", "W8A16", "W4A16", "W8A8_SQ_PER_CHANNEL")
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "QWenForCausalLM": "qwen2",
    "Qwen2ForCausalLM": "qwen2",
}
_QUANTIZATION_KEYS = {
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "smoothquant_val",
    "clamp_val",
    "use_meta_recipe",
    "has_zero_point",
    "pre_quant_scale",
    "exclude_modules",
}
_DEFAULT_EXCLUDED = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding")


@dataclass(frozen=True)
class UnifiedConfig:
    shape: ModelShape
    mapping: Mapping
    dtype: np.dtype[Any]
    algorithm: str | None
    group_size: int
    has_prequant_scale: bool
    has_zero_point: bool
    kv_cache_algorithm: str | None
    excluded: tuple[str, ...]

    def is_excluded(self, module: str) -> bool:
        """Whether the module stays in ``dtype``."""
        return any(fnmatchcase(module, pattern) for pattern in self.excluded)


def read_unified_config(config: ReadMapping[str, Any], source: str) -> UnifiedConfig:
    """Raises CheckpointError for a model or a quantization that is not known here."""
    model_type = _MODEL_TYPES.get(str(config.get("architecture")))
    if model_type is None:
        raise CheckpointError(
            f"{source}: architecture {config.get('architecture')!r} is not known here; known: {', '.join(_MODEL_TYPES)}"
        )
    if not isinstance(config.get("dtype"), str) or config["dtype"] not in DTYPES:
        raise CheckpointError(f"{source}: dtype is {config.get('dtype')!r}, expected one of {', '.join(DTYPES)}")
    quantization = _section(config, "quantization", source)
    algorithm = quantization.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{source}: quant_algo {algorithm!r} is not known here; known: {', '.join(map(str, ALGORITHMS[1:]))}"
        )
    excluded = quantization.get("exclude_modules")
    if excluded is not None and not isinstance(excluded, list):
        raise CheckpointError(f"{source}: exclude_modules is {excluded!r}, expected a list of module names")
    return UnifiedConfig(
        shape=_shape(config, model_type, source),
        mapping=_mapping(config, source),
        dtype=DTYPES[config["dtype"]],
        algorithm=algorithm,
        group_size=_positive(quantization, "group_size", 128, source),
        has_prequant_scale=bool(quantization.get("pre_quant_scale")),
        has_zero_point=bool(quantization.get("has_zero_point")),
        kv_cache_algorithm=quantization.get("kv_cache_quant_algo"),
        excluded=_DEFAULT_EXCLUDED if excluded is None else tuple(map(str, excluded)),
    )


def config_findings(config: ReadMapping[str, Any], unified: UnifiedConfig) -> list[Finding]:
    """What the loader would stumble over in a config.json that ``read_unified_config`` could read."""
    unknown = sorted((config.get("quantization") or {}).keys() - _QUANTIZATION_KEYS)
    findings = [Finding("config", f"quantization.{key}", "the loader refuses this key; remove it") for key in unknown]
    ranks = unified.mapping.world_size
    world_size = (config.get("mapping") or {}).get("world_size", 1)
    if world_size != ranks:
        message = f"is {world_size!r}, expected tp_size x pp_size = {ranks}"
        findings.append(Finding("config", "mapping.world_size", message))
    return findings


def _shape(config: ReadMapping[str, Any], model_type: str, source: str) -> ModelShape:
    has_bias = config.get("attn_bias", model_type == "qwen2")
    as_hugging_face = {
        "model_type": model_type,
        **{
            key: config.get(key)
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        },
        "num_key_value_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_size"),
        "attention_bias": has_bias if model_type == "llama" else False,
        "mlp_bias": config.get("mlp_bias", False),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }
    return ModelShape.from_config(as_hugging_face, source)


def _mapping(config: ReadMapping[str, Any], source: str) -> Mapping:
    mapping = _section(config, "mapping", source)
    if _positive(mapping, "cp_size", 1, source) != 1:
        raise CheckpointError(
            f"{source}: cp_size is {mapping['cp_size']}; only checkpoints with cp_size 1 are known here"
        )
    return Mapping(_positive(mapping, "tp_size", 1, source), _positive(mapping, "pp_size", 1, source))


def _section(config: ReadMapping[str, Any], key: str, source: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{source}: {key} is {value!r}, expected a mapping")
    return value or {}


def _positive(config: ReadMapping[str, Any], key: str, default: int, source: str) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 < value <= LARGEST:
        raise CheckpointError(f"{source}: {key} is {value!r}, expected a positive integer")
    return value
