"""What the tensors of the supported model families are, by their Hugging Face names."""

from __future__ import annotations

import re
from typing import Any, Literal

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint
from quantize.mixture import MIXTURE_TYPES, Mixture

Role = Literal["linear", "router", "embeddings", "lm_head", "vector", "derived"]

GEMMA_TYPES = ("gemma2", "gemma3_text")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", *GEMMA_TYPES, "granite", *MIXTURE_TYPES)
QK_NORM_TYPES = ("qwen3", "qwen3_moe", "gemma3_text")
_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # after and before those of others
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_FUSED_LINEARS = ("self_attn.qkv_proj", "mlp.gate_up_proj")  # of Phi-3's own layout
# Linears of one input, which run-times compute as one product.
_FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
_LAYER_TENSOR = re.compile(r"model\.layers\.\d+\.(.+)\.(weight|bias)")
_EXPERT_LINEAR = re.compile(r"(block_sparse_moe\.experts\.\d+\.)(w[123])|(mlp\.experts\.\d+\.)((?:gate|up|down)_proj)")
_ROUTERS = ("block_sparse_moe.gate", "mlp.gate")
_FUSED_IN_EXPERT = (("w1", "w3"), ("gate_proj", "up_proj"))


def role_of(name: str) -> Role | None:
    """None: no tensor of these families. "derived": old files store a table that the config gives as well."""
    if name == "model.embed_tokens.weight":
        return "embeddings"
    if name == "lm_head.weight":
        return "lm_head"
    if name == "model.norm.weight":
        return "vector"
    if name.endswith(".rotary_emb.inv_freq"):
        return "derived"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return None
    module, kind = match.groups()
    if module in (*_LINEARS, *_FUSED_LINEARS):
        return "linear" if kind == "weight" else "vector"
    if kind == "weight" and (module in _ROUTERS or _EXPERT_LINEAR.fullmatch(module)):
        return "router" if module in _ROUTERS else "linear"
    return "vector" if module in (*_NORMS, *_GEMMA_NORMS, *_QK_NORMS) and kind == "weight" else None


def norms_of(model_type: str) -> tuple[str, ...]:
    """Norms of a decoder layer that are as wide as its hidden states, by name."""
    return (*_NORMS, *_GEMMA_NORMS) if model_type in GEMMA_TYPES else _NORMS


def mlp_norm(model_type: str) -> str:
    """The norm whose outputs the MLP reads."""
    return "pre_feedforward_layernorm" if model_type in GEMMA_TYPES else "post_attention_layernorm"


def norms_add_one(model_type: str) -> bool:
    """Whether a norm is stored as w and scales by 1 + w."""
    return model_type in GEMMA_TYPES


def fused_set(name: str) -> tuple[str, ...]:
    """Names of the weights that run-times fuse with the weight ``name``, itself included."""
    for modules in _FUSED:
        for module in modules:
            if name.endswith(f".{module}.weight"):
                prefix = name.removesuffix(f"{module}.weight")
                return tuple(f"{prefix}{other}.weight" for other in modules)
    if ".experts." in name:  # run-times stack a layer's experts, each with scales of its own
        prefix, module, kind = name.rsplit(".", 2)
        for modules in _FUSED_IN_EXPERT:
            if module in modules:
                return tuple(f"{prefix}.{other}.{kind}" for other in modules)
    return (name,)


def check_complete(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of another family, one with unknown tensors and one that lacks some."""
    model_type = checkpoint.config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{checkpoint.path}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    required = _required(checkpoint, str(model_type))
    unknown = [name for name in checkpoint.names() if role_of(name) is None or _is_stray(name, required)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unknown[0]!r} ({len(unknown)} such) belongs to no {model_type} model"
        )
    present = set(checkpoint.names())
    missing = [name for name in required if name not in present]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {missing[0]!r} is missing ({len(missing)} of them are); download it again"
        )


def _is_stray(name: str, required: dict[str, None]) -> bool:
    """A router, an expert or a fused projection where the config has none."""
    is_fused = any(f".{module}." in name for module in _FUSED_LINEARS)
    return (is_fused or ".experts." in name or role_of(name) == "router") and name not in required


def _required(checkpoint: Checkpoint, model_type: str) -> dict[str, None]:
    """Names, in order."""
    source = str(checkpoint.path)
    num_layers = _num_layers(checkpoint.config, len(checkpoint), source)
    mixture = Mixture.from_config(checkpoint.config, f"{source}: config.json")
    names = ["model.embed_tokens.weight"]
    for layer in range(num_layers):
        for module in _layer_modules(model_type, mixture, layer):
            names.append(f"model.layers.{layer}.{module}.weight")
    head = [] if checkpoint.is_tied else ["lm_head.weight"]
    return dict.fromkeys([*names, "model.norm.weight", *head])


def _layer_modules(model_type: str, mixture: Mixture | None, layer: int) -> list[str]:
    others = [*norms_of(model_type), *(_QK_NORMS if model_type in QK_NORM_TYPES else ())]
    if mixture is None or not mixture.sparse_layers[layer]:
        return [*_LINEARS, *others]
    attention = [module for module in _LINEARS if module.startswith("self_attn.")]
    return [*attention, *others, mixture.router, *(module for expert in mixture.experts for module in expert)]


def _num_layers(config: dict[str, Any], num_tensors: int, source: str) -> int:
    value = config.get("num_hidden_layers")
    if type(value) is not int or not 0 < value <= num_tensors:
        raise CheckpointError(f"{source}: num_hidden_layers is {value!r} for {num_tensors} tensors")
    return value
