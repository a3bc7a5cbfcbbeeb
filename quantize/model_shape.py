"""Which tensors a model of the supported families has, and their shapes, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from plansmith_errors import CheckpointError
from quantize.architectures import GEMMA_TYPES, MODEL_TYPES, QK_NORM_TYPES, norms_of
from quantize.mixture import Mixture

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
FUSED_SETS = (QKV, GATE_UP)
FUSED_PROJECTIONS = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}  # how Phi-3's own layout has them
LARGEST = 2**31 - 1  # of a size; run-times keep them in 32 bits
_HEAD_DIMS = {"qwen3": 128} | dict.fromkeys(GEMMA_TYPES, 256)  # of transformers, where the key is absent
_MAY_HAVE_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "granite", *GEMMA_TYPES)
MOST_LAYERS = 10_000  # a damaged config must not make us list tensors for ever


@dataclass(frozen=True)
class Linear:
    """One linear layer of a decoder layer: y = W x + b with W [out, in]."""

    module: str  # "self_attn.q_proj"
    out_features: int
    in_features: int
    has_bias: bool


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements, Hugging Face names."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool
    mixture: Mixture | None = None  # of models with experts
    is_fused: bool = False  # the linears are those of FUSED_PROJECTIONS, not their parts

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> ModelShape:
        """Read a Hugging Face config.json; ``source`` names it in errors. Raises CheckpointError."""
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise CheckpointError(
                f"{source}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
            )
        hidden_size, num_heads = _size(config, "hidden_size", source), _size(config, "num_attention_heads", source)
        attention_bias = model_type in _MAY_HAVE_ATTENTION_BIAS and _flag(config, "attention_bias", source)
        shape = cls(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size", source),
            num_layers=_size(config, "num_hidden_layers", source, maximum=MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", source, num_heads),
            head_dim=_size(config, "head_dim", source, _HEAD_DIMS.get(str(model_type), hidden_size // num_heads)),
            vocab_size=_size(config, "vocab_size", source),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type in ("llama", "granite") and _flag(config, "mlp_bias", source),
            qk_norm=model_type in QK_NORM_TYPES,
            is_tied=_flag(config, "tie_word_embeddings", source),
            mixture=Mixture.from_config(config, source),
        )
        if shape.num_heads % shape.num_kv_heads:
            raise CheckpointError(
                f"{source}: {shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads"
            )
        return shape

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of every dense decoder layer, in the order of use."""
        hidden, q_size, kv_size = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            Linear("self_attn.q_proj", q_size, hidden, self.qkv_bias),
            Linear("self_attn.k_proj", kv_size, hidden, self.qkv_bias),
            Linear("self_attn.v_proj", kv_size, hidden, self.qkv_bias),
            Linear("self_attn.o_proj", hidden, q_size, self.o_bias),
            Linear("mlp.gate_proj", self.intermediate_size, hidden, self.mlp_bias),
            Linear("mlp.up_proj", self.intermediate_size, hidden, self.mlp_bias),
            Linear("mlp.down_proj", hidden, self.intermediate_size, self.mlp_bias),
        )
        return _fused(linears) if self.is_fused else linears

    @property
    def norms(self) -> dict[str, int]:
        """Norms of a decoder layer and how many weights each has."""
        norms = dict.fromkeys(norms_of(self.model_type), self.hidden_size)
        return norms | {f"self_attn.{name}": self.head_dim for name in ("q_norm", "k_norm") if self.qk_norm}

    def linears_of(self, layer: int) -> tuple[Linear, ...]:
        """The linear layers of one decoder layer, in the order of use; its router is none of them."""
        if self.mixture is None or not self.mixture.sparse_layers[layer]:
            return self.linears
        attention = tuple(linear for linear in self.linears if linear.module.startswith("self_attn."))
        return attention + self._expert_linears

    @cached_property
    def _expert_linears(self) -> tuple[Linear, ...]:
        if self.mixture is None:
            return ()
        hidden, size = self.hidden_size, self.mixture.intermediate_size
        return tuple(
            linear
            for gate, up, down in self.mixture.experts
            for linear in (
                Linear(gate, size, hidden, False),
                Linear(up, size, hidden, False),
                Linear(down, hidden, size, False),
            )
        )

    def linear_weights(self) -> Iterator[tuple[str, Linear]]:
        """The name of every linear weight of the decoder, and its layer."""
        for layer in range(self.num_layers):
            for linear in self.linears_of(layer):
                yield f"model.layers.{layer}.{linear.module}.weight", linear

    def other_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of everything that is no linear weight of the decoder: embeddings, norms, biases, head."""
        yield EMBEDDINGS, (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for norm, size in self.norms.items():
                yield f"{prefix}{norm}.weight", (size,)
            if self.mixture is not None and self.mixture.sparse_layers[layer]:
                yield f"{prefix}{self.mixture.router}.weight", (self.mixture.num_experts, self.hidden_size)
            for linear in self.linears_of(layer):
                if linear.has_bias:
                    yield f"{prefix}{linear.module}.bias", (linear.out_features,)
        yield FINAL_NORM, (self.hidden_size,)
        if not self.is_tied:
            yield LM_HEAD, (self.vocab_size, self.hidden_size)


def _fused(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    found: dict[str, Linear] = {}
    for linear in linears:
        module = next((name for name, parts in FUSED_PROJECTIONS.items() if linear.module in parts), linear.module)
        rows = linear.out_features + (found[module].out_features if module in found else 0)
        found[module] = replace(linear, module=module, out_features=rows)
    return tuple(found.values())


def _size(
    config: Mapping[str, Any], key: str, source: str, default: int | None = None, *, maximum: int = LARGEST
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 0 < value <= maximum:
        raise CheckpointError(f"{source}: {key} is {value!r}, expected an integer of 1 to {maximum}")
    return value


def _flag(config: Mapping[str, Any], key: str, source: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {value!r}, expected true or false")
    return bool(value)
