"""Small models with experts, under the names of published checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny_checkpoints import FFN, HIDDEN, LAYERS, tiny_config, tiny_weights, write_safetensors

EXPERTS = 4


def mixture_config(model_type: str = "qwen3_moe", **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"num_local_experts": EXPERTS}
    if model_type == "qwen3_moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "mlp_only_layers": [0]}
    return tiny_config(model_type, num_experts_per_tok=2, **own) | {"tie_word_embeddings": False} | changes


def mixture_weights(model_type: str = "qwen3_moe") -> dict[str, np.ndarray]:
    """The MLPs of tiny_weights replaced by experts; of Qwen3's model in the last layer alone."""
    rng = np.random.default_rng(3)
    weights = tiny_weights(tied=False)
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if model_type == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        if model_type == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{norm}.weight"] = np.ones(16, np.float32)
            if layer == 0:
                continue
        shapes = [weights.pop(f"{prefix}mlp.{name}.weight").shape for name in ("gate_proj", "up_proj", "down_proj")]
        weights[f"{prefix}{block}.gate.weight"] = rng.normal(0, 0.05, (EXPERTS, HIDDEN)).astype(np.float32)
        for expert in range(EXPERTS):
            for name, shape in zip(names, shapes, strict=True):
                values = rng.normal(0, 0.02 * (1 + expert), shape).astype(np.float32)
                weights[f"{prefix}{block}.experts.{expert}.{name}.weight"] = values
    return weights


def write_mixture(path: Path, model_type: str = "qwen3_moe", **changes: Any) -> Path:
    return write_safetensors(path, mixture_weights(model_type), mixture_config(model_type, **changes))
