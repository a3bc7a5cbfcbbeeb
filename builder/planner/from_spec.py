"""The planner's view of a model that can be built, from its ModelSpec."""

from __future__ import annotations

from builder.model_spec import ModelSpec
from builder.planner.attention import GroupedQueryAttention
from builder.planner.decoder_shape import DecoderShape, LayerShape, Matrix
from quantize.mixture import Mixture


def shape_of_spec(spec: ModelSpec) -> DecoderShape:
    return DecoderShape(
        model_type=spec.model_type,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        layers=tuple(_layer(spec, layer) for layer in range(spec.num_layers)),
        is_tied=spec.tie_word_embeddings,
    )


def _layer(spec: ModelSpec, layer: int) -> LayerShape:
    mixture = spec.mixture
    attention = GroupedQueryAttention(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        window=spec.sliding_windows[layer],
        is_capped=spec.attention_soft_cap is not None,
    )
    matrices = attention_matrices(attention, spec.hidden_size, qkv_bias=spec.qkv_bias, o_bias=spec.o_bias)
    if mixture is not None and mixture.sparse_layers[layer]:
        matrices += mixture_matrices(mixture, spec.hidden_size)
    else:
        matrices += gated_matrices("mlp", spec.hidden_size, spec.intermediate_size, has_bias=spec.mlp_bias)
    norms = (4 if spec.post_norms else 2) * spec.hidden_size
    return LayerShape(matrices, norms + (2 * spec.head_dim if spec.qk_norm else 0), attention)


def attention_matrices(
    attention: GroupedQueryAttention, hidden_size: int, *, qkv_bias: bool = False, o_bias: bool = False
) -> tuple[Matrix, ...]:
    q_size, kv_size = attention.output_width, attention.num_kv_heads * attention.head_dim
    return (
        Matrix("self_attn.q_proj", q_size, hidden_size, "columns", has_bias=qkv_bias),
        Matrix("self_attn.k_proj", kv_size, hidden_size, "kv_heads", has_bias=qkv_bias),
        Matrix("self_attn.v_proj", kv_size, hidden_size, "kv_heads", has_bias=qkv_bias),
        Matrix("self_attn.o_proj", hidden_size, q_size, "rows", has_bias=o_bias),
    )


def gated_matrices(module: str, hidden_size: int, width: int, *, has_bias: bool = False) -> tuple[Matrix, ...]:
    """A gated MLP (arXiv 2002.05202)."""
    return (
        Matrix(f"{module}.gate_proj", width, hidden_size, "columns", has_bias=has_bias),
        Matrix(f"{module}.up_proj", width, hidden_size, "columns", has_bias=has_bias),
        Matrix(f"{module}.down_proj", hidden_size, width, "rows", has_bias=has_bias),
    )


def mixture_matrices(mixture: Mixture, hidden_size: int) -> tuple[Matrix, ...]:
    width, count, active = mixture.intermediate_size, mixture.num_experts, mixture.experts_per_token
    gate, up, down = (f"{mixture.block}.experts.{{}}.{name}" for name in mixture.projections)
    return (
        Matrix(mixture.router, count, hidden_size, role="router"),
        Matrix(gate, width, hidden_size, "columns", count=count, active=active),
        Matrix(up, width, hidden_size, "columns", count=count, active=active),
        Matrix(down, hidden_size, width, "rows", count=count, active=active),
    )
