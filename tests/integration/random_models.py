"""Random small models of each family, and what transformers computes of a quantized checkpoint of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from quantize import Checkpoint, Recipe, load_weight, open_checkpoint, quantize_checkpoint

VOCAB_SIZE = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits of the size real models have; the default gives next to nothing
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # in phi3


def save_model(path: Path, model_type: str, settings: dict[str, Any]) -> None:
    """A random float32 model, as transformers saves it."""
    config = transformers.AutoConfig.for_model(model_type, **(_SHAPE | settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:  # transformers starts these at 0 and 1, which hides mistakes
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)


def quantized(source: Path, output: Path, linears: dict[str, Any]) -> Path:
    quantize_checkpoint(source, output, Recipe(name="matrix", linears=linears))
    return output


def transformers_model(source: Path, checkpoint: Path, scratch: Path) -> Any:
    """The model of ``source`` with the weights of ``checkpoint`` as they are after rounding."""
    opened = open_checkpoint(checkpoint)
    values = {name: _rounded(opened, name) for name in load_file(source / "model.safetensors")}
    scratch.mkdir()
    save_file(values, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    return transformers.AutoModelForCausalLM.from_pretrained(
        scratch, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _rounded(checkpoint: Checkpoint, name: str) -> np.ndarray:
    fused = next((last for last in _FUSED if f".{last}." in name), None)
    names = [name] if fused is None else [name.replace(fused, separate) for separate in _FUSED[fused]]
    return np.concatenate([np.array(load_weight(checkpoint, name).dequantize()) for name in names])


def round_inputs_to_fp8(model: Any, tp_size: int) -> None:
    """Each decoder linear's inputs to e4m3 and back, token by token; where ranks share them, each rank's part alone."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            parts = tp_size if name.endswith(("o_proj", "down_proj")) else 1
            module.register_forward_pre_hook(_rounding(parts))


def _rounding(parts: int) -> Any:
    def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        chunks = inputs[0].chunk(parts, dim=-1)
        scales = [chunk.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448 for chunk in chunks]
        return torch.cat(
            [(x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip(chunks, scales, strict=True)], dim=-1
        )

    return hook


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """[num_tokens, vocab_size] of one sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
