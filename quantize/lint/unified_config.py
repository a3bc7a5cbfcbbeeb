"""config.json of a TensorRT-LLM unified checkpoint, anyone's: the model, the cut and the quantization it describes.

Of a mix of schemes, quant_cfg.json beside it says what each module is. tensorrt_llm/models/modeling_utils.py and
quantization/quantize.py (1.2).
"""

from __future__ import annotations

from collections.abc import Mapping as ReadMapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from plansmith_errors import CheckpointError
from quantize.export.casting import DTYPES
from quantize.export.trtllm_modules import layer_modules, stage_layers
from quantize.export.trtllm_schemes import (
    FP8_ROWWISE,
    MIXED_PRECISION,
    SQ_PLUGIN,
    SQ_TOKEN_PLUGIN,
    WHOLE_BLOCKS,
    ModuleScheme,
)
from quantize.lint.finding import Finding
from quantize.model_shape import LARGEST, ModelShape
from quantize.parallel import Mapping

_OF_LINEARS = ("W4A16_AWQ", "W4A8_AWQ", "FP8", "W8A16", "W4A16", "W8A8_SQ_PER_CHANNEL", "NVFP4")
_ALGORITHMS = (*_OF_LINEARS, FP8_ROWWISE, SQ_PLUGIN, SQ_TOKEN_PLUGIN, MIXED_PRECISION)
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "QWenForCausalLM": "qwen2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_KV_ALGORITHMS = ("FP8", "INT8")
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
    "mamba_ssm_cache_dtype",
}
_DEFAULT_EXCLUDED = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding")


@dataclass(frozen=True)
class UnifiedConfig:
    """``own``: of the modules that are not excluded. ``layers``: of a mix, every quantized module's own instead."""

    shape: ModelShape
    mapping: Mapping
    dtype: np.dtype[Any]
    own: ModuleScheme
    kv_cache_algorithm: str | None
    excluded: tuple[str, ...]
    embedding_dim: int | None = None  # along which the ranks share the embeddings; None: each has all of them
    layers: ReadMapping[str, ModuleScheme] | None = None

    @property
    def schemes(self) -> list[ModuleScheme]:
        """Each that a module may have, once."""
        return [self.own] if self.layers is None else list(dict.fromkeys(self.layers.values()))

    @property
    def embedding_shape(self) -> tuple[int, int]:
        """Of one rank."""
        shape, tp = self.shape, self.mapping.tp_size
        if self.embedding_dim == 0:
            return -(-shape.vocab_size // tp), shape.hidden_size
        return shape.vocab_size, shape.hidden_size // (tp if self.embedding_dim == 1 else 1)

    def scheme_of(self, module: str) -> ModuleScheme:
        """Of a linear module, by the name that it has in its stage."""
        if self.layers is not None:
            return next((own for name, own in self.layers.items() if fnmatchcase(module, name)), ModuleScheme())
        block = module.rpartition(".")[0]
        if self.own.algorithm in WHOLE_BLOCKS:  # the head stays as it is, and the plugins of W8A8 know no exceptions
            is_kept = not block or (self.own.algorithm == FP8_ROWWISE and self._is_excluded(block))
        else:
            is_expert = self.shape.mixture is not None and block.endswith(".mlp")
            is_kept = self._is_excluded(block if is_expert else module)
        return ModuleScheme() if is_kept else self.own

    def _is_excluded(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self.excluded)


def read_unified_config(
    config: ReadMapping[str, Any], source: str, layers: ReadMapping[str, Any] | None = None
) -> UnifiedConfig:
    """``layers``: quant_cfg.json. Raises CheckpointError for a model or a quantization that is not known here."""
    model_type = _MODEL_TYPES.get(str(config.get("architecture")))
    if model_type is None:
        raise CheckpointError(
            f"{source}: architecture {config.get('architecture')!r} is not known here; known: {', '.join(_MODEL_TYPES)}"
        )
    if not isinstance(config.get("dtype"), str) or config["dtype"] not in DTYPES:
        raise CheckpointError(f"{source}: dtype is {config.get('dtype')!r}, expected one of {', '.join(DTYPES)}")
    quantization = _section(config, "quantization", source)
    excluded = quantization.get("exclude_modules")
    if excluded is not None and not isinstance(excluded, list):
        raise CheckpointError(f"{source}: exclude_modules is {excluded!r}, expected a list of module names")
    own = _scheme(quantization, source, _ALGORITHMS)
    return UnifiedConfig(
        shape=_shape(config, model_type, source),
        mapping=_mapping(config, source),
        dtype=DTYPES[config["dtype"]],
        own=own,
        kv_cache_algorithm=quantization.get("kv_cache_quant_algo"),
        excluded=_DEFAULT_EXCLUDED if excluded is None else tuple(map(str, excluded)),
        embedding_dim=_embedding_dim(config, source),
        layers=_layers(layers, source) if own.algorithm == MIXED_PRECISION else None,
    )


def _embedding_dim(config: ReadMapping[str, Any], source: str) -> int | None:
    if not config.get("use_parallel_embedding"):
        return None
    dim = config.get("embedding_sharding_dim", 0)
    if dim not in (0, 1):
        raise CheckpointError(f"{source}: embedding_sharding_dim is {dim!r}, expected 0 or 1")
    return int(dim)


def _scheme(quantization: ReadMapping[str, Any], source: str, known: tuple[str, ...]) -> ModuleScheme:
    algorithm = quantization.get("quant_algo")
    if algorithm is not None and algorithm not in known:
        raise CheckpointError(f"{source}: quant_algo {algorithm!r} is not known here; known: {', '.join(known)}")
    return ModuleScheme(
        algorithm,
        _positive(quantization, "group_size", 128, source),
        has_prequant=algorithm in ("W4A8_AWQ", "W8A8_SQ_PER_CHANNEL") or bool(quantization.get("pre_quant_scale")),
        has_zero=bool(quantization.get("has_zero_point")),
    )


def _layers(config: ReadMapping[str, Any] | None, source: str) -> dict[str, ModuleScheme]:
    found = {} if config is None else config.get("quantized_layers")
    if config is None or not isinstance(found, dict) or not all(isinstance(layer, dict) for layer in found.values()):
        raise CheckpointError(
            f"{source}: quant_algo is {MIXED_PRECISION}, expected quantized_layers of every module in quant_cfg.json"
        )
    for name, layer in found.items():
        unknown = layer.keys() - _QUANTIZATION_KEYS
        if unknown:
            raise CheckpointError(f"{source}: {name} has the key {min(unknown)!r}, which the loader refuses; remove it")
    return {name: _scheme(layer, f"{source}: {name}", _OF_LINEARS) for name, layer in found.items()}


def config_findings(config: ReadMapping[str, Any], unified: UnifiedConfig) -> list[Finding]:
    """What the loader would stumble over in a config.json that ``read_unified_config`` could read."""
    unknown = sorted((config.get("quantization") or {}).keys() - _QUANTIZATION_KEYS)
    findings = [Finding("config", f"quantization.{key}", "the loader refuses this key; remove it") for key in unknown]
    if unified.kv_cache_algorithm not in (None, *_KV_ALGORITHMS):
        message = f"is {unified.kv_cache_algorithm!r}, expected null or one of {', '.join(_KV_ALGORITHMS)}"
        findings.append(Finding("config", "quantization.kv_cache_quant_algo", message))
    modules = _module_names(unified)
    findings += [
        Finding("config", f"quantized_layers.{name}", "names no module of this model")
        for name in unified.layers or ()
        if not any(fnmatchcase(module, name) for module in modules)
    ]
    ranks = unified.mapping.world_size
    world_size = (config.get("mapping") or {}).get("world_size", 1)
    if world_size != ranks:
        message = f"is {world_size!r}, expected tp_size x pp_size = {ranks}"
        findings.append(Finding("config", "mapping.world_size", message))
    return findings


def _module_names(unified: UnifiedConfig) -> set[str]:
    """As the stages call them; of experts also the block, which is quantized as one."""
    names = {
        f"transformer.layers.{local}.{name}"
        for local, layer in stage_layers(unified.shape, unified.mapping)
        for name, _ in layer_modules(unified.shape, layer)
    }
    return names | {name.rpartition(".")[0] for name in names} | {"lm_head"}


def _shape(config: ReadMapping[str, Any], model_type: str, source: str) -> ModelShape:
    is_qwen = model_type.startswith("qwen")
    has_bias = config.get("attn_bias", is_qwen)
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
        **_experts(config, source),
    }
    shape = ModelShape.from_config(as_hugging_face, source)
    return replace(shape, qkv_bias=has_bias is True) if is_qwen else shape


def _experts(config: ReadMapping[str, Any], source: str) -> dict[str, Any]:
    """As Hugging Face configs of both families say it."""
    moe = _section(config, "moe", source)
    return {
        "num_local_experts": moe.get("num_experts"),
        "num_experts_per_tok": moe.get("top_k"),
        "moe_intermediate_size": config.get("moe_intermediate_size"),
    }


def _mapping(config: ReadMapping[str, Any], source: str) -> Mapping:
    mapping = _section(config, "mapping", source)
    if _positive(mapping, "cp_size", 1, source) != 1:
        raise CheckpointError(
            f"{source}: cp_size is {mapping['cp_size']}; only checkpoints with cp_size 1 are known here"
        )
    if _positive(mapping, "moe_ep_size", 1, source) != 1:
        raise CheckpointError(
            f"{source}: moe_ep_size is {mapping['moe_ep_size']}; only checkpoints with moe_ep_size 1 are known here"
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
