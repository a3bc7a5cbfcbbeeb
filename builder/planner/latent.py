"""DeepSeek's decoders: latent attention and fine-grained experts with shared ones (arXiv 2405.04434, 2412.19437)."""

from __future__ import annotations

from builder.config_reader import ConfigReader
from builder.planner.attention import LatentAttention
from builder.planner.decoder_shape import DecoderShape, LayerShape, Matrix
from builder.planner.from_spec import gated_matrices
from plansmith_errors import BuildError

_MOST_LAYERS = _MOST_EXPERTS = 10_000  # a damaged config must not make us list tensors for ever


def read_latent(reader: ConfigReader) -> DecoderShape:
    """Without the layers of multi-token prediction, which a decoder does not run. Raises BuildError."""
    hidden_size = reader.integer("hidden_size")
    attention = LatentAttention(
        num_heads=reader.integer("num_attention_heads"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    q_rank = None if reader.get("q_lora_rank") is None else reader.integer("q_lora_rank")
    matrices = _attention(attention, hidden_size, q_rank)
    norms = 2 * hidden_size + attention.kv_lora_rank + (q_rank or 0)
    dense = LayerShape(
        matrices + gated_matrices("mlp", hidden_size, reader.integer("intermediate_size")), norms, attention
    )
    sparse = LayerShape(matrices + _experts(reader, hidden_size), norms, attention)
    num_layers = reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    first, step = reader.integer("first_k_dense_replace", minimum=0), reader.integer("moe_layer_freq", 1)
    return DecoderShape(
        model_type=str(reader.get("model_type")),
        hidden_size=hidden_size,
        vocab_size=reader.integer("vocab_size"),
        max_positions=reader.integer("max_position_embeddings"),
        layers=tuple(sparse if layer >= first and layer % step == 0 else dense for layer in range(num_layers)),
        is_tied=reader.boolean("tie_word_embeddings", False),
    )


def _attention(attention: LatentAttention, hidden_size: int, q_rank: int | None) -> tuple[Matrix, ...]:
    heads, query_width = attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim
    if q_rank is None:
        queries: tuple[Matrix, ...] = (Matrix("self_attn.q_proj", heads * query_width, hidden_size, "columns"),)
    else:
        queries = (
            Matrix("self_attn.q_a_proj", q_rank, hidden_size),
            Matrix("self_attn.q_b_proj", heads * query_width, q_rank, "columns"),
        )
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    expanded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    return (
        *queries,
        Matrix("self_attn.kv_a_proj_with_mqa", latent, hidden_size),
        Matrix("self_attn.kv_b_proj", expanded, attention.kv_lora_rank, "columns"),
        Matrix("self_attn.o_proj", hidden_size, attention.output_width, "rows"),
    )


def _experts(reader: ConfigReader, hidden_size: int) -> tuple[Matrix, ...]:
    count, active = reader.integer("n_routed_experts", maximum=_MOST_EXPERTS), reader.integer("num_experts_per_tok")
    if active > count:
        raise BuildError(f"{reader.where}: num_experts_per_tok is {active}; expected at most n_routed_experts, {count}")
    width, shared = reader.integer("moe_intermediate_size"), reader.integer("n_shared_experts", 0, minimum=0)
    routed = (
        Matrix("mlp.gate", count, hidden_size, role="router"),
        Matrix("mlp.experts.{}.gate_proj", width, hidden_size, "columns", count=count, active=active),
        Matrix("mlp.experts.{}.up_proj", width, hidden_size, "columns", count=count, active=active),
        Matrix("mlp.experts.{}.down_proj", hidden_size, width, "rows", count=count, active=active),
    )
    # The shared experts are one wider MLP that every token runs through.
    return routed + (gated_matrices("mlp.shared_experts", hidden_size, shared * width) if shared else ())
