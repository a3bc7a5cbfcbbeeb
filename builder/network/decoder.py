"""The decoder of all families, for every target."""

from __future__ import annotations

from builder.model_spec import ModelSpec
from builder.network.moe import sparse_mlp
from builder.network.ops import AttentionSpec, NetworkOps, T
from builder.parallel import Rank


def decoder(ops: NetworkOps[T], spec: ModelSpec, rank: Rank | None = None) -> T:
    """Compute one step; return logits [num_logits, vocab_size], or what an earlier pipeline stage hands on.

    ``spec`` counts heads and features as this rank has them.
    """
    rank = rank or Rank()
    hidden = embedding(ops, spec) if rank.is_first_stage else ops.receive_hidden()
    for layer in rank.layers(spec.num_layers):
        hidden = decoder_layer(ops, spec, layer, hidden, rank)
    if not rank.is_last_stage:
        return ops.send_hidden(hidden)
    hidden = ops.gather_logits_rows(hidden)
    hidden = ops.rms_norm(hidden, "model.norm.weight", spec.rms_norm_eps)
    return finish_logits(ops, spec, ops.lm_head(hidden, spec.lm_head_name))


def embedding(ops: NetworkOps[T], spec: ModelSpec) -> T:
    return scaled(ops, ops.embedding("model.embed_tokens.weight"), spec.embedding_scale)


def finish_logits(ops: NetworkOps[T], spec: ModelSpec, logits: T) -> T:
    """What the head gives to the model's logits, element by element."""
    logits = scaled(ops, logits, spec.logits_scale)
    return logits if spec.logits_soft_cap is None else ops.soft_cap(logits, spec.logits_soft_cap)


def decoder_layer(ops: NetworkOps[T], spec: ModelSpec, layer: int, hidden: T, rank: Rank | None = None) -> T:
    """[num_tokens, hidden_size] to the same shape."""
    prefix = f"model.layers.{layer}."
    normed = ops.rms_norm(hidden, prefix + "input_layernorm.weight", spec.rms_norm_eps)
    hidden = add_residual(ops, spec, hidden, attention(ops, spec, layer, normed), prefix + "post_attention_layernorm")
    normed = ops.rms_norm(hidden, f"{prefix}{spec.mlp_norm}.weight", spec.rms_norm_eps)
    return add_residual(
        ops, spec, hidden, mlp(ops, spec, rank or Rank(), layer, normed), prefix + "post_feedforward_layernorm"
    )


def add_residual(ops: NetworkOps[T], spec: ModelSpec, hidden: T, found: T, post_norm: str) -> T:
    """``hidden`` and what attention or the MLP found."""
    if spec.post_norms:
        found = ops.rms_norm(found, post_norm + ".weight", spec.rms_norm_eps)
    return ops.add(hidden, scaled(ops, found, spec.residual_scale))


def attention(ops: NetworkOps[T], spec: ModelSpec, layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}.self_attn."
    q = ops.split_heads(linear(ops, x, prefix + "q_proj", spec.qkv_bias), spec.num_heads)
    k = ops.split_heads(linear(ops, x, prefix + "k_proj", spec.qkv_bias), spec.num_kv_heads)
    v = ops.split_heads(linear(ops, x, prefix + "v_proj", spec.qkv_bias), spec.num_kv_heads)
    if spec.qk_norm:
        q = ops.rms_norm(q, prefix + "q_norm.weight", spec.rms_norm_eps)
        k = ops.rms_norm(k, prefix + "k_norm.weight", spec.rms_norm_eps)
    attended = ops.paged_attention(ops.rope(q, layer), ops.rope(k, layer), v, attention_spec(spec, layer))
    return row_linear(ops, attended, prefix + "o_proj", spec.o_bias)


def attention_spec(spec: ModelSpec, layer: int) -> AttentionSpec:
    return AttentionSpec(
        layer=layer,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        sliding_window=spec.sliding_windows[layer],
        scale=spec.attention_scale,
        soft_cap=spec.attention_soft_cap,
    )


def mlp(ops: NetworkOps[T], spec: ModelSpec, rank: Rank, layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}."
    if spec.mixture is not None and spec.mixture.sparse_layers[layer]:
        return sparse_mlp(ops, spec.mixture, rank, prefix, x)
    return gated_mlp(ops, spec, prefix + "mlp.", x)


def gated_mlp(ops: NetworkOps[T], spec: ModelSpec, prefix: str, x: T) -> T:
    """SwiGLU or GeGLU (arXiv 2002.05202): ``down(activation(gate(x)) * up(x))``."""
    activate = ops.gelu_tanh if spec.activation == "gelu_tanh" else ops.silu
    gate = activate(linear(ops, x, prefix + "gate_proj", spec.mlp_bias))
    up = linear(ops, x, prefix + "up_proj", spec.mlp_bias)
    return row_linear(ops, ops.multiply(gate, up), prefix + "down_proj", spec.mlp_bias)


def scaled(ops: NetworkOps[T], x: T, factor: float) -> T:
    return x if factor == 1.0 else ops.scale(x, factor)


def linear(ops: NetworkOps[T], x: T, module: str, has_bias: bool) -> T:
    return ops.linear(x, module + ".weight", module + ".bias" if has_bias else None)


def row_linear(ops: NetworkOps[T], x: T, module: str, has_bias: bool) -> T:
    return ops.row_linear(x, module + ".weight", module + ".bias" if has_bias else None)
