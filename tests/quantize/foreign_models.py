"""Tiny models as other tools store them, packed value by value from the formats' documents, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_checkpoints import tiny_config

Tensors = dict[str, Any]
Pack = Callable[[str, np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
"""(module, its float weights, rng) -> what is stored beside ``module.``, and the weights that it means."""

E4M3 = torch.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds the output AWQ_ORDER[i]


HIDDEN, FFN, KV_ROWS, VOCAB = 160, 288, 80, 96  # no multiples of 128: the last blocks are smaller
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_ROWS, HIDDEN),
    "self_attn.v_proj": (KV_ROWS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
DOWN = "model.layers.0.mlp.down_proj"


def model_config(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1, "head_dim": HIDDEN // 4}
    return tiny_config(**{**sizes, **changes})


def write_model(path: Path, pack: Pack, quantization: Any, extra: Tensors | None = None) -> dict[str, np.ndarray]:
    """Write a llama of one layer with its linears packed; returned is what every tensor of the plain model is."""
    rng = np.random.default_rng(3)
    meant: dict[str, Any] = {
        "model.embed_tokens.weight": rng.normal(0, 0.05, (VOCAB, HIDDEN)).astype(np.float32),
        "model.norm.weight": rng.normal(1, 0.05, HIDDEN).astype(np.float32),
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        meant[f"model.layers.0.{norm}.weight"] = rng.normal(1, 0.05, HIDDEN).astype(np.float32)
    stored: Tensors = dict(meant)
    for part, shape in LINEARS.items():
        module = f"model.layers.0.{part}"
        parts, meant[f"{module}.weight"] = pack(module, rng.normal(0, 0.05, shape).astype(np.float32), rng)
        stored |= {f"{module}.{kind}": value for kind, value in parts.items()}
    extra_config = {} if quantization is None else {"quantization_config": quantization}
    write(path, stored | (extra or {}), model_config(**extra_config))
    return meant


def write(path: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    as_torch = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        for name, value in tensors.items()
    }
    save_file({name: value.contiguous() for name, value in as_torch.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def pack_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of values to rows of int32: one long integer per row, the first value lowest."""
    words = -(-values.shape[1] * bits // 32)
    packed = np.zeros((len(values), words), np.uint32)
    for row, line in enumerate(values.tolist()):
        number = sum(value << (bits * place) for place, value in enumerate(line))
        packed[row] = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(words)]
    return packed.view(np.int32)


def spread(grouped: np.ndarray, index: np.ndarray) -> np.ndarray:
    return grouped[:, index].astype(np.float32)


def random_integers(
    rng: np.random.Generator, rows: int, columns: int, groups: int, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, z and s: the extreme values are among them."""
    largest = 2**bits - 1
    q = rng.integers(0, largest + 1, (rows, columns))
    q[0, :2] = [0, largest]
    z = np.full((rows, groups), 2 ** (bits - 1)) if symmetric else rng.integers(0, largest + 1, (rows, groups))
    if not symmetric:
        z[:2, 0] = [0, largest]
    return q, z, (rng.random((rows, groups)) * 0.01 + 0.001).astype(np.float16)


def gptq(
    bits: int = 4, group_size: int = 32, *, version: int = 1, symmetric: bool = True, act_order: bool = False
) -> tuple[Pack, dict[str, Any]]:
    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        group = columns if group_size == -1 else group_size
        q, z, s = random_integers(rng, rows, columns, columns // group, bits, symmetric)
        index = np.arange(columns) // group
        if act_order:
            index = rng.permutation(index)
        parts = {
            "qweight": pack_words(q, bits).T,
            "qzeros": less_one(z.T, bits) if version == 1 else pack_words(z.T, bits),
            "scales": s.T,
            "g_idx": index.astype(np.int32),
        }
        return parts, (q - spread(z, index)) * spread(s, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}
    return pack, config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})


def less_one(zeros: np.ndarray, bits: int) -> np.ndarray:
    """GPTQModel's convert_gptq_v2_to_v1_format_module: from whole words at once; 3 bits from every value."""
    if bits == 3:
        return pack_words((zeros - 1) % 8, bits)
    ones = sum(1 << place for place in range(0, 32, bits))
    return pack_words(zeros, bits) - np.array([ones], np.int64).astype(np.int32)


def awq(group: int = 32) -> tuple[Pack, dict[str, Any]]:
    def words(values: np.ndarray) -> np.ndarray:
        packed = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
        for word in range(packed.shape[1]):
            for place, output in enumerate(AWQ_ORDER):
                packed[:, word] |= values[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
        return packed.view(np.int32)

    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        q, z, s = random_integers(rng, rows, columns, columns // group, 4, False)
        index = np.arange(columns) // group
        return {"qweight": words(q.T), "qzeros": words(z.T), "scales": s.T}, (q - spread(z, index)) * spread(s, index)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return pack, config


def to_e4m3(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(E4M3)


def fp8(shape: str, kind: str = "weight_scale") -> Pack:
    """``shape`` of the scales: tensor, scalar, channel, column, block or block4."""

    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        sizes = {
            "tensor": (1,),
            "scalar": (),
            "channel": (rows,),
            "column": (rows, 1),
            "block": (-(-rows // 128), -(-columns // 128)),
            "block4": (-(-rows // 128), 1, -(-columns // 128), 1),
        }
        scales = (rng.random(sizes[shape]) * 0.01 + 0.001).astype(np.float32)
        values = to_e4m3((rng.normal(0, 100, weight.shape)).clip(-448, 448).astype(np.float32))
        if shape in ("block", "block4"):
            full = np.kron(scales.reshape(sizes["block"]), np.ones((128, 128), np.float32))[:rows, :columns]
        else:
            full = scales.reshape(-1, 1)
        return {"weight": values, kind: np.array(scales)}, values.to(torch.float32).numpy() * full

    return pack


def modelopt_int4(group: int = 32, *, pre_quant_scale: bool = False) -> Pack:
    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        q = rng.integers(-8, 8, (rows, columns))
        s = (rng.random((rows, columns // group)) * 0.01 + 0.001).astype(np.float32)
        packed = (q[0::2] & 15) | ((q[1::2] & 15) << 4)
        meant = q.astype(np.float32) * spread(s, np.arange(columns) // group)
        parts: Tensors = {"weight": packed.astype(np.uint8), "weight_scale": s}
        if pre_quant_scale:
            parts["pre_quant_scale"] = (rng.random(columns) + 0.5).astype(np.float32)
            meant = meant * parts["pre_quant_scale"]
        return parts, meant

    return pack


def modelopt_int8(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    q = rng.integers(-127, 128, weight.shape).astype(np.int8)
    s = (rng.random(len(q)) * 0.01 + 0.001).astype(np.float32)
    factors = (rng.random(weight.shape[1]) + 0.5).astype(np.float32)
    parts = {"weight": q, "weight_scale": s, "pre_quant_scale": factors, "input_scale": np.float32(0.1)}
    return parts, q.astype(np.float32) * s[:, None] * factors


def modelopt_fp4(scheme: str) -> Pack:
    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        block = 16 if scheme == "nvfp4" else 32
        q = rng.integers(0, 16, (rows, columns))
        parts: Tensors = {"weight": (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8)}
        index = np.arange(columns) // block
        if scheme == "mxfp4":
            exponents = rng.integers(110, 130, (rows, columns // block)).astype(np.uint8)
            parts["weight_scale"] = exponents
            return parts, E2M1[q] * spread(2.0 ** (exponents.astype(np.float64) - 127), index)
        scales = to_e4m3((rng.random((rows, columns // block)) * 400 + 1).astype(np.float32))
        parts |= {"weight_scale": scales, "weight_scale_2": np.float32(0.00037)}
        return parts, E2M1[q] * spread(scales.to(torch.float32).numpy(), index) * np.float32(0.00037)

    return pack
