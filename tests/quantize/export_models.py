"""A small model that can be cut over eight ranks, quantized; and how each layout is read back by its written rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

import quantize
from quantize.recipe import Recipe

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 512, 8, 2, 32, 3, 99
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
RECIPES: dict[str, dict[str, Any]] = {
    "int4": {"linears": {"scheme": "int4", "group_size": 64, "symmetric": True}, "embeddings": {"scheme": "int8"}},
    "int4-128": {"linears": {"scheme": "int4", "group_size": 128, "symmetric": True}},
    "int4-asym": {"linears": {"scheme": "int4", "group_size": 32, "symmetric": False}},
    "int4-32": {"linears": {"scheme": "int4", "group_size": 32, "symmetric": True}},
    "fp8": {"linears": {"scheme": "fp8"}},
    "int8": {"linears": {"scheme": "int8"}},
    "none": {"linears": {"scheme": "none"}},
}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **changes,
    }


def weights(model_type: str = "llama", tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.05, shape).astype(np.float16)

    found = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for module, shape in LINEARS.items():
            found[f"{prefix}{module}.weight"] = random(*shape)
            if model_type == "qwen2" and module[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{prefix}{module}.bias"] = random(shape[0])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = random(HIDDEN)
    return found if tied else found | {"lm_head.weight": random(VOCAB, HIDDEN)}


def write_model(path: Path, model_type: str = "llama", **changes: Any) -> Path:
    path.mkdir(parents=True)
    tied = changes.get("tie_word_embeddings", False)
    save_file(weights(model_type, tied), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config(model_type, **changes)))
    for name in ("tokenizer.json", "generation_config.json"):
        (path / name).write_text("{}")
    (path / "LICENSE").write_text("MIT")
    return path


def write_quantized(path: Path, recipe: str, overrides: Any = (), **model: Any) -> Path:
    source = write_model(path.parent / f"{path.name}-source", **model)
    chosen = Recipe.model_validate({"name": recipe, **RECIPES[recipe], "overrides": overrides})
    quantize.quantize_checkpoint(source, path, chosen)
    return path


def dequantized(path: Path, name: str) -> np.ndarray:
    """What the neutral checkpoint says the weight is."""
    return quantize.load_weight(quantize.open_checkpoint(path), name).dequantize()


def load(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file through its own library; floats as float32, integers as they are."""
    tensors = load_file(path)
    return {
        name: (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in tensors.items()
    }


def nibble(value: int) -> int:
    """Four bits of two's complement."""
    return value - 16 if value >= 8 else value


NIBBLES = np.array([nibble(value) for value in range(16)])


def rows_from_nibbles(packed: np.ndarray) -> np.ndarray:
    """[out / 2, in] bytes to [out, in]: the low nibble is the even row."""
    raw = packed.view(np.uint8)
    rows = np.zeros((2 * raw.shape[0], raw.shape[1]))
    for index in range(raw.shape[0]):
        rows[2 * index] = NIBBLES[raw[index] % 16]
        rows[2 * index + 1] = NIBBLES[raw[index] // 16]
    return rows


def scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """values [out, in] times scales [out, groups], each spread over its group."""
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
