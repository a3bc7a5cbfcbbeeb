"""Tiny models written by independent writers: the safetensors package and gguf's GGUFWriter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 128, 4, 2, 16, 2, 96

GGML_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
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
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **changes,
    }


def tiny_weights(model_type: str = "llama", seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face names."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.05, shape).astype(np.float32)

    q_rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q_rows, HIDDEN),
        "self_attn.k_proj": (kv_rows, HIDDEN),
        "self_attn.v_proj": (kv_rows, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q_rows),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN) + 1}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for module, shape in shapes.items():
            weights[f"{prefix}{module}.weight"] = random(*shape)
            if model_type == "qwen2" and module.split(".")[-1] in ("q_proj", "k_proj", "v_proj"):
                weights[f"{prefix}{module}.bias"] = random(shape[0])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = random(HIDDEN) + 1
    if not tied:
        weights["lm_head.weight"] = random(VOCAB, HIDDEN)
    return weights


def write_safetensors(
    directory: Path, weights: dict[str, np.ndarray], config: dict[str, Any] | None = None, **side_files: str
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config or tiny_config()))
    for name, text in side_files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def llama_permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute: the two halves of each head's rotary rows interleaved."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def ggml_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, kind = name.rsplit(".", 1)
    if module in top:
        return f"{top[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{GGML_NAMES[part]}.{kind}"


def byte_level_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """A gpt2-style vocabulary of VOCAB tokens: printable bytes, three merges, specials, unused padding."""
    letters = [chr(code) for code in range(ord("!"), ord("_"))] + ["Ġ"]
    words = ["HE", "LL", "HELL"]
    specials = ["<|begin|>", "<|end|>"]
    padding = [f"[PAD{index}]" for index in range(VOCAB - len(letters) - len(words) - len(specials))]
    tokens = [*letters, *words, *specials, *padding]
    types = [1] * (len(letters) + len(words)) + [3] * len(specials) + [5] * len(padding)
    return tokens, types, ["H E", "L L", "HE LL"]


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    architecture: str = "llama",
    *,
    quantization: gguf.GGMLQuantizationType | None = None,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write weights with Hugging Face names as llama.cpp's converter does; matrices quantized when asked."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer, architecture)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[
            type(value)
        ]
        add(key, value)
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = llama_permute(weight, heads) if heads and architecture == "llama" else weight
        if quantization is not None and weight.ndim == 2:
            writer.add_tensor(ggml_name(name), gguf.quants.quantize(stored, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(ggml_name(name), np.ascontiguousarray(stored))
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, architecture: str) -> None:
    tokens, types, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture == "qwen2" else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template("{{ messages[0]['content'] }}")
