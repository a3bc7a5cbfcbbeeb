"""The decoder of llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe, for every target."""

from __future__ import annotations

from builder.model_spec import ModelSpec
from builder.network.moe import sparse_mlp
from builder.network.ops import AttentionSpec, NetworkOps, T


def decoder(ops: NetworkOps[T], spec: ModelSpec) -> T:
    """Compute one step; return logits [num_logits, vocab_size]."""
    hidden = ops.embedding("model.embed_tokens.weight")
    for layer in range(spec.num_layers):
        hidden = decoder_layer(ops, spec, layer, hidden)
    hidden = ops.gather_logits_rows(hidden)
    hidden = ops.rms_norm(hidden, "model.norm.weight", spec.rms_norm_eps)
    return ops.linear(hidden, spec.lm_head_name)


def decoder_layer(ops: NetworkOps[T], spec: ModelSpec, layer: int, hidden: T) -> T:
    """[num_tokens, hidden_size] to the same shape."""
    prefix = f"model.layers.{layer}."
    normed = ops.rms_norm(hidden, prefix + "input_layernorm.weight", spec.rms_norm_eps)
    hidden = ops.add(hidden, attention(ops, spec, layer, normed))
    normed = ops.rms_norm(hidden, prefix + "post_attention_layernorm.weight", spec.rms_norm_eps)
    return ops.add(hidden, mlp(ops, spec, layer, normed))


def attention(ops: NetworkOps[T], spec: ModelSpec, layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}.self_attn."
    q = ops.split_heads(linear(ops, x, prefix + "q_proj", spec.qkv_bias), spec.num_heads)
    k = ops.split_heads(linear(ops, x, prefix + "k_proj", spec.qkv_bias), spec.num_kv_heads)
    v = ops.split_heads(linear(ops, x, prefix + "v_proj", spec.qkv_bias), spec.num_kv_heads)
    if spec.qk_norm:
        q = ops.rms_norm(q, prefix + "q_norm.weight", spec.rms_norm_eps)
        k = ops.rms_norm(k, prefix + "k_norm.weight", spec.rms_norm_eps)
    attended = ops.paged_attention(ops.rope(q), ops.rope(k), v, attention_spec(spec, layer))
    return linear(ops, attended, prefix + "o_proj", spec.o_bias)


def attention_spec(spec: ModelSpec, layer: int) -> AttentionSpec:
    return AttentionSpec(layer, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.sliding_windows[layer])


def mlp(ops: NetworkOps[T], spec: ModelSpec, layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}."
    if spec.mixture is not None and spec.mixture.sparse_layers[layer]:
        return sparse_mlp(ops, spec.mixture, prefix, x)
    return gated_mlp(ops, spec, prefix + "mlp.", x)


def gated_mlp(ops: NetworkOps[T], spec: ModelSpec, prefix: str, x: T) -> T:
    """SwiGLU (arXiv 2002.05202): ``down(silu(gate(x)) * up(x))``."""
    gate = ops.silu(linear(ops, x, prefix + "gate_proj", spec.mlp_bias))
    up = linear(ops, x, prefix + "up_proj", spec.mlp_bias)
    return linear(ops, ops.multiply(gate, up), prefix + "down_proj", spec.mlp_bias)


def linear(ops: NetworkOps[T], x: T, module: str, has_bias: bool) -> T:
    return ops.linear(x, module + ".weight", module + ".bias" if has_bias else None)
