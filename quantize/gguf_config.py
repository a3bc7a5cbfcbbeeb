"""GGUF metadata into config.json and generation_config.json."""

from __future__ import annotations

import json
import logging
import math
from math import prod
from typing import Any

import numpy as np

from plansmith_errors import CheckpointError
from quantize.gguf_file import GgufFile

log = logging.getLogger(__name__)

ROPE_FREQS = "rope_freqs.weight"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
}


def convert_config(file: GgufFile, architecture: str, is_tied: bool) -> dict[str, Any]:
    """config.json of the model. Metadata that would change its numbers is converted or refused, never dropped."""
    prefix = architecture + "."
    _refuse_unknown(file, prefix)
    hidden_size = _positive(file, prefix + "embedding_length")
    num_heads = _positive(file, prefix + "attention.head_count")
    head_dim = file.get(prefix + "attention.key_length", int) or hidden_size // num_heads
    _check_head_dims(file, prefix, head_dim)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, prefix + "feed_forward_length"),
        "num_hidden_layers": _positive(file, prefix + "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(file, prefix, num_heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": _positive(file, prefix + "context_length"),
        "rms_norm_eps": _positive_float(file, prefix + "attention.layer_norm_rms_epsilon"),
        "rope_theta": _positive_float(file, prefix + "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, prefix, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
        **special_token_ids(file),
    }
    if architecture == "qwen2":
        config["use_sliding_window"] = False
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    return config


def convert_generation_config(file: GgufFile) -> bytes:
    """generation_config.json: every token that ends a turn is an eos token."""
    ids = special_token_ids(file)
    ends = [ids.get("eos_token_id"), *(_token_id(file, name) for name in ("eot", "eom"))]
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    config = {**ids, "eos_token_id": unique if len(unique) > 1 else unique[0]} if unique else ids
    return (json.dumps(config, indent=2) + "\n").encode()


def special_token_ids(file: GgufFile) -> dict[str, int]:
    ids = {"bos": _token_id(file, "bos"), "eos": _token_id(file, "eos"), "pad": _token_id(file, "padding")}
    return {f"{name}_token_id": token for name, token in ids.items() if token is not None}


def _token_id(file: GgufFile, name: str) -> int | None:
    token = file.get(f"tokenizer.ggml.{name}_token_id", int)
    # Old converters write 0xFFFFFFFF for "none".
    return token if token is not None and token < _vocab_size(file) else None


def _positive(file: GgufFile, key: str) -> int:
    value = file.require(key, int)
    if value <= 0:
        raise CheckpointError(f"{file.path}: {key} is {value}, expected a positive number")
    return value


def _positive_float(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.get(key, float)
    if value is None:
        value = file.require(key, float) if default is None else default
    if not 0 < value < math.inf:
        raise CheckpointError(f"{file.path}: {key} is {value}, expected a positive number")
    return float(str(np.float32(value)))  # 1e-05 rather than 9.999999747378752e-06: the same float32


def _num_kv_heads(file: GgufFile, prefix: str, num_heads: int) -> int:
    value = file.get(prefix + "attention.head_count_kv", int)
    if value is not None and (value <= 0 or num_heads % value):
        raise CheckpointError(f"{file.path}: {num_heads} attention heads cannot share {value} key-value heads")
    return value or num_heads


def _vocab_size(file: GgufFile) -> int:
    return prod(file.tensors["token_embd.weight"].shape[:1])


def _refuse_unknown(file: GgufFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        short = key.removeprefix(prefix)
        if not key.startswith(prefix) or short in _KNOWN:
            continue
        if short.startswith(("rope.", "attention.")) or short.endswith("_scale"):
            raise CheckpointError(f"{file.path}: {key} = {value!r} changes the model's numbers and is not supported")
        log.warning("%s: %s = %r is unknown and left out of config.json", file.path, key, value)
    if file.get(prefix + "expert_count", int):
        raise CheckpointError(f"{file.path}: is a mixture of experts; supported are dense llama and qwen2 models")


def _check_head_dims(file: GgufFile, prefix: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.get(prefix + key, int)
        if value not in (None, head_dim):
            raise CheckpointError(f"{file.path}: {prefix}{key} is {value}, expected head_dim, which is {head_dim}")
    if head_dim <= 0 or head_dim % 2:
        raise CheckpointError(f"{file.path}: head_dim is {head_dim}, expected a positive even number")


def _rope_scaling(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any] | None:
    scaling = prefix + "rope.scaling."
    kind = file.get(scaling + "type", str)
    linear = _positive_float(file, prefix + "rope.scale_linear", 1.0)  # of old files, in place of scaling.factor
    factor = _positive_float(file, scaling + "factor", linear)
    if ROPE_FREQS in file.tensors:
        if kind not in (None, "none") and factor != 1.0:
            raise CheckpointError(
                f"{file.path}: has both {ROPE_FREQS} and {scaling}type {kind!r}; expected one of them"
            )
        return _llama3_scaling(file, prefix, head_dim)
    if kind != "yarn" and file.get(scaling + "attn_factor", float) not in (None, 1.0):
        raise CheckpointError(
            f"{file.path}: {scaling}attn_factor is supported with the type yarn alone, found {kind!r}"
        )
    if kind == "none" or (kind is None and factor == 1.0):
        return None
    if kind in ("linear", None):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(file, scaling, factor)
    raise CheckpointError(f"{file.path}: {scaling}type is {kind!r}; supported: none, linear, yarn")


def _yarn_scaling(file: GgufFile, scaling: str, factor: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.require(scaling + "original_context_length", int),
    }
    for ours, theirs in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
        value = file.get(scaling + theirs, float)
        if value is not None:
            values[ours] = value
    attention = file.get(scaling + "attn_factor", float)
    if attention not in (None, 1.0):
        # llama.cpp multiplies YaRN's own factor by this one; config.json has the product.
        values["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return values


def _llama3_scaling(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's parameters from the table of divisors that llama.cpp stores in their place."""
    if file.tensors[ROPE_FREQS].type_name != "F32" or file.tensors[ROPE_FREQS].shape != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: {ROPE_FREQS} is not F32 [{head_dim // 2}]")
    table = file.rows(ROPE_FREQS).reshape(-1).view(np.float32)
    theta = _positive_float(file, prefix + "rope.freq_base", 10000.0)
    factor = round(float(table.max()), 3)
    for original in (8192, 2048, 4096, 16384, 32768, 65536, 131072):
        if np.allclose(table, llama3_divisors(head_dim, theta, factor, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(f"{file.path}: {ROPE_FREQS} is not a table of Llama 3's rope scaling; it cannot be converted")


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each frequency [head_dim / 2] is divided by, for low_freq_factor 1 and high_freq_factor 4 (Llama 3.1)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
