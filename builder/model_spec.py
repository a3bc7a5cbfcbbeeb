"""What a decoder-only language model computes, read from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from builder.config_reader import ConfigReader
from builder.rope_spec import RopeSpec, read_rope
from plansmith_errors import BuildError, CheckpointError
from quantize.mixture import MIXTURE_TYPES, Mixture

_MOST_LAYERS = 10_000
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_QWEN_MAX_WINDOW_LAYERS = 28  # of transformers' Qwen2Config and Qwen3Config, where the key is absent
_MISTRAL_SLIDING_WINDOW = 4096  # of transformers' MistralConfig, where the key is absent


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention and a gated SiLU MLP, or experts that are such MLPs.

    Sizes are in elements.
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
    mixture: Mixture | None = None  # of models with experts

    @property
    def lm_head_name(self) -> str:
        return "model.embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a ``config.json``. Raises BuildError for whatever we would compute wrongly."""
        reader = ConfigReader(config)
        model_type = _model_type(reader)
        _refuse_other_features(reader)
        num_heads = reader.integer("num_attention_heads")
        num_layers = reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)
        attention_bias = model_type in ("llama", "qwen3", "qwen3_moe") and reader.boolean("attention_bias", False)
        return cls(
            model_type=model_type,
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, model_type, num_heads),
            head_dim=_head_dim(reader, model_type, num_heads),
            vocab_size=reader.integer("vocab_size"),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            rms_norm_eps=reader.positive_float("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and reader.boolean("mlp_bias", False),
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            rope=read_rope(reader),
            sliding_windows=_sliding_windows(reader, model_type, num_layers),
            eos_token_ids=_eos_token_ids(reader),
            mixture=_mixture(reader),
        )


def _model_type(reader: ConfigReader) -> str:
    found = reader.get("model_type")
    if found not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise BuildError(f"{reader.where}: model_type {found!r} is not supported; supported architectures: {known}")
    return str(found)


def _refuse_other_features(reader: ConfigReader) -> None:
    activation = reader.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise BuildError(f"{reader.where}: hidden_act {activation!r} is not supported; supported: silu")
    experts = () if reader.get("model_type") in MIXTURE_TYPES else ("num_local_experts", "num_experts")
    for key in (*experts, "attn_logit_softcapping", "final_logit_softcapping"):
        if reader.get(key):
            raise BuildError(
                f"{reader.where}: {key} is {reader.get(key)!r}; models of this type without it are supported"
            )


def _mixture(reader: ConfigReader) -> Mixture | None:
    try:
        return Mixture.from_config(reader.config, reader.where)
    except CheckpointError as error:
        raise BuildError(str(error)) from None


def _num_kv_heads(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    # Only llama's config means "as many as query heads" by a missing key.
    count = reader.integer("num_key_value_heads", num_heads if model_type == "llama" else None)
    if num_heads % count:
        raise BuildError(
            f"{reader.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {count}"
        )
    return count


def _head_dim(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    hidden_size = reader.integer("hidden_size")
    if reader.get("head_dim") is None and model_type != "qwen3" and hidden_size % num_heads:
        raise BuildError(
            f"{reader.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = reader.integer("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads or None)
    if head_dim % 2 or head_dim < 4:
        raise BuildError(f"{reader.where}: head_dim is {head_dim}; expected an even number of 4 or more")
    return head_dim


def _sliding_windows(reader: ConfigReader, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        absent = "sliding_window" not in reader.config
        window = _MISTRAL_SLIDING_WINDOW if absent else _optional_window(reader)
        return (window,) * num_layers
    if model_type == "mixtral":
        return (_optional_window(reader),) * num_layers
    if model_type == "qwen3_moe":  # unlike Qwen3's dense models, all layers or none
        slides = reader.boolean("use_sliding_window", False)
        return (_optional_window(reader) if slides else None,) * num_layers
    window = _optional_window(reader) if reader.boolean("use_sliding_window", False) else None
    return tuple(window if sliding else None for sliding in _sliding_layers(reader, num_layers))


def _optional_window(reader: ConfigReader) -> int | None:
    return None if reader.get("sliding_window") is None else reader.integer("sliding_window")


def _sliding_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers slide: ``layer_types``, or in older configs all from ``max_window_layers`` on."""
    kinds = reader.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", _QWEN_MAX_WINDOW_LAYERS, minimum=0)
        return [layer >= first for layer in range(num_layers)]
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(map(str, kinds)):
        raise BuildError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _eos_token_ids(reader: ConfigReader) -> tuple[int, ...]:
    found = reader.get("eos_token_id")
    values = [] if found is None else found if isinstance(found, list) else [found]
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
        raise BuildError(f"{reader.where}: eos_token_id is {found!r}; expected a token id or a list of them")
    return tuple(values)
