"""What single families add to the common decoder, and what of it is refused. Defaults: transformers 5.24."""

from __future__ import annotations

import math
from typing import Literal

from builder.config_reader import ConfigReader
from plansmith_errors import BuildError
from quantize.mixture import MIXTURE_TYPES

Activation = Literal["silu", "gelu_tanh"]

GEMMA_TYPES = ("gemma2", "gemma3_text")
_GEMMA_QUERY_PRE_ATTN_SCALAR = 256
_GEMMA2_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def read_activation(reader: ConfigReader, model_type: str) -> Activation:
    """Of the gated MLP. Raises BuildError for one that the family is not computed with here."""
    kind: Activation = "gelu_tanh" if model_type in GEMMA_TYPES else "silu"
    # Gemma's older key hidden_act is not read by transformers; some published configs have it wrong.
    key = "hidden_activation" if kind == "gelu_tanh" else "hidden_act"
    found, names = reader.get(key) or _ACTIVATIONS[kind][0], _ACTIVATIONS[kind]
    if found not in names:
        raise BuildError(f"{reader.where}: {key} {found!r} is not supported; supported: {names[0]}")
    return kind


def refuse_other_features(reader: ConfigReader, model_type: str) -> None:
    """Raises BuildError for a key that would change what is computed and that the family is not known to have."""
    refused = [] if model_type in MIXTURE_TYPES else ["num_local_experts", "num_experts"]
    if model_type != "gemma2":
        refused.append("attn_logit_softcapping")  # transformers keeps Gemma 3's key and does not apply it
    if model_type not in GEMMA_TYPES:
        refused.append("final_logit_softcapping")
    for key in (*refused, "use_bidirectional_attention"):
        if reader.get(key):
            raise BuildError(
                f"{reader.where}: {key} is {reader.get(key)!r}; models of this type without it are supported"
            )


def soft_caps(reader: ConfigReader, model_type: str) -> tuple[float | None, float | None]:
    """Of the query-key products and of the logits. A null means none; only a missing key means Gemma 2's own."""
    if model_type == "gemma2":
        attention, logits = (
            reader.optional_float(key) if key in reader.config else cap for key, cap in _GEMMA2_SOFT_CAPS.items()
        )
        return attention, logits
    return None, reader.optional_float("final_logit_softcapping") if model_type == "gemma3_text" else None


def attention_scale(reader: ConfigReader, model_type: str, head_dim: int) -> float:
    """The factor of the query-key products."""
    if model_type == "granite":
        return reader.positive_float("attention_multiplier", 1.0)
    if model_type in GEMMA_TYPES:
        return float(reader.positive_float("query_pre_attn_scalar", _GEMMA_QUERY_PRE_ATTN_SCALAR) ** -0.5)
    return float(head_dim**-0.5)


def embedding_scale(reader: ConfigReader, model_type: str) -> float:
    """The factor of the embeddings.

    transformers rounds Gemma's to the model's dtype: in bfloat16 the square root of 3072 is 55.5. Here it stays exact.
    """
    if model_type == "granite":
        return reader.positive_float("embedding_multiplier", 1.0)
    return math.sqrt(reader.integer("hidden_size")) if model_type in GEMMA_TYPES else 1.0
