"""What attention keeps in the KV cache for a token, and what it computes for a query and a key, on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Grouped-query attention (arXiv 2305.13245): each of ``num_kv_heads`` serves num_heads / num_kv_heads queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, itself included; None: all
    is_capped: bool = False  # scores are soft-capped, which no fused kernel does: they are kept

    def kv_elements(self, tp_size: int) -> int:
        """Keys and values of one token. A rank has one head at least: with more ranks than heads they are copied."""
        return 2 * max(self.num_kv_heads // tp_size, 1) * self.head_dim

    def pair_flops(self, tp_size: int, *, decode: bool) -> float:
        """Operations for one query token and one key token: the product of scores, and that with the values."""
        return 4 * self.num_heads * self.head_dim / tp_size

    def activation_elements(self, tp_size: int) -> int:
        """Queries, keys, values and the output of one token."""
        return 2 * self.num_heads * self.head_dim // tp_size + self.kv_elements(tp_size)

    @property
    def output_width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token leaves one latent vector and one rotated key for all heads, so every rank keeps the same.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    window: int | None = None
    is_capped: bool = False

    def kv_elements(self, tp_size: int) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def pair_flops(self, tp_size: int, *, decode: bool) -> float:
        """Decoding multiplies with the latent vectors themselves, the projections absorbed; prefill expands them."""
        if decode:
            width = 2 * self.kv_lora_rank + self.qk_rope_head_dim
        else:
            width = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        return 2 * self.num_heads * width / tp_size

    def activation_elements(self, tp_size: int) -> int:
        heads = self.num_heads * (2 * self.qk_nope_head_dim + 2 * self.qk_rope_head_dim + 2 * self.v_head_dim)
        return heads // tp_size + self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def output_width(self) -> int:
        return self.num_heads * self.v_head_dim


Attention = GroupedQueryAttention | LatentAttention
