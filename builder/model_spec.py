"""What a decoder-only language model computes, read from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from builder.config_reader import ConfigReader
from builder.family_features import (
    GEMMA_TYPES,
    Activation,
    attention_scale,
    embedding_scale,
    read_activation,
    refuse_other_features,
    soft_caps,
)
from builder.rope_spec import RopeSpec, read_ropes
from builder.sliding_windows import read_sliding_windows
from plansmith_errors import BuildError, CheckpointError
from quantize.mixture import Mixture
from quantize.text_part import text_config

_MOST_LAYERS = 10_000
SUPPORTED_MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "gemma2",
    "gemma3_text",
    "granite",
)
# What a missing key means, as the families' configs in transformers have it.
_DEFAULT_EPS = {"mixtral": 1e-5, "phi3": 1e-5}
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}
_AS_MANY_KV_HEADS = ("llama", "phi3", "granite")
_MAY_HAVE_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "granite", *GEMMA_TYPES)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention and a gated MLP, or experts that are such MLPs.

    Sizes are in elements. What only some families have is at its neutral value in all others.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of queries and keys, before RoPE
    tie_word_embeddings: bool
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]  # of each layer, in tokens, the query's own included; None: full attention
    eos_token_ids: tuple[int, ...]
    attention_scale: float  # factor of the query-key products
    mixture: Mixture | None = None  # of models with experts
    activation: Activation = "silu"  # of the gated MLP
    post_norms: bool = False  # a norm after attention and one after the MLP as well, before they are added
    norms_add_one: bool = False  # a norm is stored as w and scales by 1 + w; WeightSource reads 1 + w
    local_rope: RopeSpec | None = None  # of the layers whose attention slides, where it is another than ``rope``
    attention_soft_cap: float | None = None  # cap * tanh(x / cap) of the scaled query-key products
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0  # factor of the embeddings; float32, where a 16-bit transformers rounds it
    residual_scale: float = 1.0  # factor of what attention and the MLP add
    logits_scale: float = 1.0

    @property
    def lm_head_name(self) -> str:
        return "model.embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    @property
    def mlp_norm(self) -> str:
        """The norm before the MLP, by its name in a layer."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that the rotary embeddings are defined for."""
        return min(rope.max_positions for rope in (self.rope, self.local_rope or self.rope))

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of one layer."""
        if self.local_rope is None or self.sliding_windows[layer] is None:
            return self.rope
        return self.local_rope

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a ``config.json``. Raises BuildError for whatever we would compute wrongly."""
        reader = ConfigReader(_text_config(config))
        model_type = _model_type(reader)
        refuse_other_features(reader, model_type)
        num_heads = reader.integer("num_attention_heads")
        num_layers = reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)
        head_dim = _head_dim(reader, model_type, num_heads)
        attention_bias = model_type in _MAY_HAVE_ATTENTION_BIAS and reader.boolean("attention_bias", False)
        rope, local_rope = read_ropes(reader, head_dim)
        attention_soft_cap, logits_soft_cap = soft_caps(reader, model_type)
        is_gemma, is_granite = model_type in GEMMA_TYPES, model_type == "granite"
        return cls(
            model_type=model_type,
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, model_type, num_heads),
            head_dim=head_dim,
            vocab_size=reader.integer("vocab_size"),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            rms_norm_eps=reader.positive_float("rms_norm_eps", _DEFAULT_EPS.get(model_type, 1e-6)),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type in ("llama", "granite") and reader.boolean("mlp_bias", False),
            qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", is_gemma),
            rope=rope,
            local_rope=local_rope,
            sliding_windows=read_sliding_windows(reader, model_type, num_layers),
            eos_token_ids=_eos_token_ids(reader),
            mixture=_mixture(reader),
            attention_scale=attention_scale(reader, model_type, head_dim),
            activation=read_activation(reader, model_type),
            post_norms=is_gemma,
            norms_add_one=is_gemma,
            attention_soft_cap=attention_soft_cap,
            logits_soft_cap=logits_soft_cap,
            embedding_scale=embedding_scale(reader, model_type),
            residual_scale=reader.positive_float("residual_multiplier", 1.0) if is_granite else 1.0,
            logits_scale=1.0 / reader.positive_float("logits_scaling", 1.0) if is_granite else 1.0,
        )


def _model_type(reader: ConfigReader) -> str:
    found = reader.get("model_type")
    if found not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise BuildError(f"{reader.where}: model_type {found!r} is not supported; supported architectures: {known}")
    return str(found)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return text_config(config, "config.json")
    except CheckpointError as error:
        raise BuildError(str(error)) from None


def _mixture(reader: ConfigReader) -> Mixture | None:
    try:
        return Mixture.from_config(reader.config, reader.where)
    except CheckpointError as error:
        raise BuildError(str(error)) from None


def _num_kv_heads(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    count = reader.integer("num_key_value_heads", num_heads if model_type in _AS_MANY_KV_HEADS else None)
    if num_heads % count:
        raise BuildError(
            f"{reader.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {count}"
        )
    return count


def _head_dim(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    hidden_size = reader.integer("hidden_size")
    default = _DEFAULT_HEAD_DIM.get(model_type)
    if reader.get("head_dim") is None and default is None and hidden_size % num_heads:
        raise BuildError(
            f"{reader.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = reader.integer("head_dim", default or hidden_size // num_heads or None)
    if head_dim % 2 or head_dim < 4:
        raise BuildError(f"{reader.where}: head_dim is {head_dim}; expected an even number of 4 or more")
    return head_dim


def _eos_token_ids(reader: ConfigReader) -> tuple[int, ...]:
    found = reader.get("eos_token_id")
    values = [] if found is None else found if isinstance(found, list) else [found]
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
        raise BuildError(f"{reader.where}: eos_token_id is {found!r}; expected a token id or a list of them")
    return tuple(values)
