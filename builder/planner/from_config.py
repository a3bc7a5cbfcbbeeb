"""The planner's view of any model it knows, from config.json alone: also of families that cannot be built yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from builder.config_reader import ConfigReader
from builder.model_spec import SUPPORTED_MODEL_TYPES, ModelSpec
from builder.planner.attention import GroupedQueryAttention
from builder.planner.decoder_shape import DecoderShape, LayerShape
from builder.planner.from_spec import attention_matrices, gated_matrices, shape_of_spec
from builder.planner.latent import read_latent
from plansmith_errors import BuildError

_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
# Dense decoders of the plain shape, whatever their norms and caps; those that can be built are read by ModelSpec.
_DENSE_TYPES = ("gemma", "gemma2", "gemma3_text", "phi3", "granite")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
_MOST_LAYERS = 10_000  # a damaged config must not make us list layers for ever


def read_decoder_shape(config: Mapping[str, Any], source: str = "config.json") -> DecoderShape:
    """Raises BuildError where a key is missing or wrong, and for a family whose shape is not known."""
    config = _text_part(config)
    reader = ConfigReader(config, source)
    model_type = reader.get("model_type")
    if model_type in SUPPORTED_MODEL_TYPES:
        return _supported(config, reader)
    known: dict[str, Callable[[ConfigReader], DecoderShape]] = {
        **dict.fromkeys(_LATENT_TYPES, read_latent),
        **dict.fromkeys(_DENSE_TYPES, _read_dense),
    }
    if not isinstance(model_type, str) or model_type not in known:
        names = ", ".join(dict.fromkeys([*SUPPORTED_MODEL_TYPES, *known]))
        raise BuildError(f"{source}: model_type {model_type!r} cannot be planned for; known architectures: {names}")
    return replace(known[model_type](reader), why_not_built=f"architecture {model_type!r} cannot be built yet")


def _supported(config: Mapping[str, Any], reader: ConfigReader) -> DecoderShape:
    # A damaged count of layers is refused before a list as long as it is made.
    reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    try:
        return shape_of_spec(ModelSpec.from_hf_config(config))
    except BuildError as error:
        raise BuildError(str(error).replace("config.json", reader.where, 1)) from None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own config, where it is a part of that of a model which sees as well."""
    part = config.get("text_config")
    return part if isinstance(part, dict) and "hidden_size" not in config else config


def _read_dense(reader: ConfigReader) -> DecoderShape:
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise BuildError(
            f"{reader.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    model_type = str(reader.get("model_type"))
    attention = GroupedQueryAttention(
        num_heads, num_kv_heads, reader.integer("head_dim", max(hidden_size // num_heads, 1))
    )
    norms = 4 if model_type in ("gemma2", "gemma3_text") else 2
    layer = LayerShape(
        attention_matrices(attention, hidden_size)
        + gated_matrices("mlp", hidden_size, reader.integer("intermediate_size")),
        norms * hidden_size + (2 * attention.head_dim if model_type == "gemma3_text" else 0),
        attention,
    )
    num_layers = reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    return DecoderShape(
        model_type=model_type,
        hidden_size=hidden_size,
        vocab_size=reader.integer("vocab_size"),
        max_positions=reader.integer("max_position_embeddings"),
        layers=tuple(_with_window(layer, attention, window) for window in _windows(reader, model_type, num_layers)),
        is_tied=reader.boolean("tie_word_embeddings", model_type in _TIED_BY_DEFAULT),
    )


def _with_window(layer: LayerShape, attention: GroupedQueryAttention, window: int | None) -> LayerShape:
    return layer if window is None else replace(layer, attention=replace(attention, window=window))


def _windows(reader: ConfigReader, model_type: str, num_layers: int) -> list[int | None]:
    """gemma2 slides in every second layer, gemma3 in all but every ``sliding_window_pattern``-th; phi3 in all."""
    if model_type in ("gemma", "granite") or reader.get("sliding_window") is None:
        return [None] * num_layers
    window, kinds = reader.integer("sliding_window"), reader.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    period = {"gemma2": 2, "phi3": 0}.get(model_type, 6)
    period = reader.integer("sliding_window_pattern", period) if period == 6 else period
    return [window if period == 0 or (layer + 1) % period else None for layer in range(num_layers)]
