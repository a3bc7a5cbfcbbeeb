"""Which linears of a decoder layer read the same input, and which module writes that input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSet:
    """Module names within a decoder layer."""

    modules: tuple[str, ...]
    producer: str  # the norm or linear whose output channels are the set's input columns


# A set comes before its producer's own: factors go into the rows of v_proj and up_proj before these are rounded.
LINEAR_SETS = (
    LinearSet(("self_attn.o_proj",), "self_attn.v_proj"),
    LinearSet(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    LinearSet(("mlp.down_proj",), "mlp.up_proj"),
    LinearSet(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
)
