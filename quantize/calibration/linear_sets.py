"""Which linears of a decoder layer read the same input, and which module writes that input."""

from __future__ import annotations

from dataclasses import dataclass

from quantize.architectures import mlp_norm
from quantize.mixture import Mixture


@dataclass(frozen=True)
class LinearSet:
    """Module names within a decoder layer."""

    modules: tuple[str, ...]
    producer: (
        str | None
    )  # the norm or linear whose output channels are the set's input columns; None: shared too widely
    expert: int | None = None  # that alone reads the input


# A set comes before its producer's own: factors go into the rows of v_proj and up_proj before these are rounded.
_ATTENTION_SETS = (
    LinearSet(("self_attn.o_proj",), "self_attn.v_proj"),
    LinearSet(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
)


def linear_sets(model_type: str, mixture: Mixture | None, layer: int) -> tuple[LinearSet, ...]:
    """Of one decoder layer. Experts' gate and up have no producer: the norm is read by the router and by all experts,
    each of which would want other factors.
    """
    if mixture is None or not mixture.sparse_layers[layer]:
        gate_up = LinearSet(("mlp.gate_proj", "mlp.up_proj"), mlp_norm(model_type))
        return (*_ATTENTION_SETS, LinearSet(("mlp.down_proj",), "mlp.up_proj"), gate_up)
    experts = [
        linears
        for index, (gate, up, down) in enumerate(mixture.experts)
        for linears in (LinearSet((down,), up, index), LinearSet((gate, up), None, index))
    ]
    return (*_ATTENTION_SETS, *experts)
