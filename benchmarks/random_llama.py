"""A Llama of the shape of 1B models with random weights: how fast it is does not depend on what it says.

16 layers, hidden 2048, MLP 8192, 32 heads over 8 KV heads of 64, untied. The vocabulary is that of the tokenizer it is
given (49152 entries of SmolLM2 against the usual 32000: the head is half as large again, for every contender).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize import Checkpoint, open_checkpoint
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
STANDARD_DEVIATION = 0.02
_LINEARS = {  # Hugging Face name -> GGUF name, rows, columns
    "self_attn.q_proj": ("attn_q", 2048, 2048),
    "self_attn.k_proj": ("attn_k", 512, 2048),
    "self_attn.v_proj": ("attn_v", 512, 2048),
    "self_attn.o_proj": ("attn_output", 2048, 2048),
    "mlp.gate_proj": ("ffn_gate", 8192, 2048),
    "mlp.up_proj": ("ffn_up", 8192, 2048),
    "mlp.down_proj": ("ffn_down", 2048, 8192),
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def gguf_names() -> dict[str, str]:
    """Hugging Face name of every tensor to its name in a GGUF file."""
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, short in [*_NORMS.items(), *((name, linear[0]) for name, linear in _LINEARS.items())]:
            names[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{short}.weight"
    return names | {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def write_checkpoint(output: Path, tokenizer_of: Checkpoint, seed: int = 0) -> None:
    """Write a bfloat16 safetensors checkpoint, tensor by tensor, with the tokenizer of another one."""
    import ml_dtypes

    vocab_size = tokenizer_of.config["vocab_size"]
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    specs = [TensorSpec(name, bfloat16, _shape(name, vocab_size)) for name in gguf_names()]
    with SafetensorsWriter(output / "model.safetensors", specs) as writer:
        for number, spec in enumerate(specs):
            slot = writer.add(spec)
            slot.write_rows(0, _random(spec.shape, np.random.default_rng([seed, number])).astype(bfloat16))
    for name, data in tokenizer_of.side_files().items():
        (output / name).write_bytes(data)
    special = {key: tokenizer_of.config.get(key) for key in ("bos_token_id", "eos_token_id")}
    (output / "config.json").write_text(json.dumps({**CONFIG, **special, "vocab_size": vocab_size}, indent=2))


def write_q4_0(checkpoint: Path, vocabulary: Path, output: Path) -> None:
    """The same weights for llama.cpp: linears Q4_0, embedding and head Q8_0; ``vocabulary`` is a GGUF to copy it from.

    Query and key rows would have to be permuted for llama.cpp's form of RoPE; among random rows that changes nothing.
    """
    import gguf

    weights = open_checkpoint(checkpoint)
    writer = gguf.GGUFWriter(output, "llama")
    for key, value in _metadata().items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    for name, field in gguf.GGUFReader(vocabulary).fields.items():
        if name.startswith("tokenizer.ggml."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    kinds = {name: _ggml_type(name) for name in gguf_names()}
    for name, short in gguf_names().items():
        shape = weights.info(name).shape
        stored = gguf.quant_shape_to_byte_shape(shape, kinds[name]) if len(shape) == 2 else (shape[0] * 4,)
        writer.add_tensor_info(short, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in gguf_names():
        writer.write_tensor_data(gguf.quantize(weights.load_float32(name), kinds[name]))
    writer.close()


def _shape(name: str, vocab_size: int) -> tuple[int, ...]:
    if "norm" in name:
        return (CONFIG["hidden_size"],)
    for linear, (_, rows, columns) in _LINEARS.items():
        if linear in name:
            return rows, columns
    return vocab_size, CONFIG["hidden_size"]


def _random(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(STANDARD_DEVIATION)


def _ggml_type(name: str) -> Any:
    import gguf

    kinds = gguf.GGMLQuantizationType
    if "norm" in name:
        return kinds.F32
    return kinds.Q4_0 if ".layers." in name else kinds.Q8_0


def _metadata() -> dict[str, Any]:
    return {
        "llama.block_count": CONFIG["num_hidden_layers"],
        "llama.context_length": CONFIG["max_position_embeddings"],
        "llama.embedding_length": CONFIG["hidden_size"],
        "llama.feed_forward_length": CONFIG["intermediate_size"],
        "llama.attention.head_count": CONFIG["num_attention_heads"],
        "llama.attention.head_count_kv": CONFIG["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "llama.rope.freq_base": CONFIG["rope_theta"],
        "llama.rope.dimension_count": CONFIG["head_dim"],
    }
