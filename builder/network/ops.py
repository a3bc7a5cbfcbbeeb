"""The operations that the decoder is written in. A target implements them once and runs every architecture.

``T`` is the target's tensor: a graph node (OpenVINO, TensorRT) or an array (eager). One object of a target stands for
one step: token ids, positions, block tables and KV pools are its own, so that the decoder names none of them. Weights
are named as in the Hugging Face checkpoint; nodes of matrix products carry the name of their weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention over its own KV pool."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens seen by a query, itself included; None: all
    scale: float  # factor of the query-key products
    soft_cap: float | None = None  # of the scaled products, before the mask: cap * tanh(product / cap)


class NetworkOps(Protocol[T]):
    """Activations are [num_tokens, features] or [num_tokens, num_heads, head_dim]; dtypes are the target's own."""

    def embedding(self, weight: str) -> T:
        """Rows of ``weight`` [vocab_size, hidden_size] for the step's token ids: [num_tokens, hidden_size]."""
        ...

    def linear(self, x: T, weight: str, bias: str | None = None) -> T:
        """``x @ weight.T + bias`` with ``weight`` [out_features, in_features]: [num_tokens, out_features]."""
        ...

    def row_linear(self, x: T, weight: str, bias: str | None = None) -> T:
        """A linear whose input features are split over the ranks of a tensor-parallel group.

        The sum of what the ranks have, then the bias, the same on each; on a single rank ``linear``.
        """
        ...

    def lm_head(self, x: T, weight: str) -> T:
        """[num_logits, hidden_size] to the logits [num_logits, vocab_size] of the whole vocabulary on every rank."""
        ...

    def rms_norm(self, x: T, weight: str, eps: float) -> T:
        """Root-mean-square norm over the last dimension (arXiv 1910.07467), scaled by ``weight``."""
        ...

    def split_heads(self, x: T, num_heads: int) -> T:
        """[num_tokens, num_heads * head_dim] to [num_tokens, num_heads, head_dim]."""
        ...

    def rope(self, x: T, layer: int) -> T:
        """Rotate by the step's positions, with the frequencies of the layer's own ``rope_of``.

        [num_tokens, num_heads, head_dim]: halves of the first ``rotary_dim`` features turn, those after are kept.
        """
        ...

    def paged_attention(self, q: T, k: T, v: T, attention: AttentionSpec) -> T:
        """Write k and v to the layer's blocks, then attend causally over all the blocks of each sequence.

        q is [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim];
        returns [num_tokens, num_heads * head_dim].
        """
        ...

    def add(self, a: T, b: T) -> T: ...

    def multiply(self, a: T, b: T) -> T: ...

    def silu(self, x: T) -> T: ...

    def gelu_tanh(self, x: T) -> T:
        """GELU in its tanh approximation (arXiv 1606.08415)."""
        ...

    def scale(self, x: T, factor: float) -> T:
        """``x`` times a constant."""
        ...

    def soft_cap(self, x: T, cap: float) -> T:
        """``cap * tanh(x / cap)``."""
        ...

    def route(self, scores: T, experts_per_token: int, *, normalizes: bool) -> T:
        """Softmax of ``scores`` [num_tokens, num_experts] where it is among the token's largest, else 0.

        ``normalizes``: the shares of a token's experts are divided by their sum.
        """
        ...

    def columns(self, x: T, begin: int, end: int) -> T:
        """Those features of [num_tokens, features]: the shares of the experts that a rank holds."""
        ...

    def mix_experts(self, x: T, shares: T, experts: Sequence[Callable[[T], T]]) -> T:
        """The sum of ``experts[e](x)``, each token's times its share ``shares[:, e]``: [num_tokens, hidden_size].

        An expert may be computed for the tokens alone whose share is above 0. Where experts are spread or split over
        ranks, ``experts`` and the columns of ``shares`` are this rank's, and the sum is that of all ranks.
        """
        ...

    def gather_logits_rows(self, x: T) -> T:
        """The rows named by the step's ``logits_indices``: [num_logits, features]."""
        ...

    def receive_hidden(self) -> T:
        """What the pipeline stage before this one ``send_hidden``: [num_tokens, hidden_size]."""
        ...

    def send_hidden(self, x: T) -> T:
        """Hand [num_tokens, hidden_size] to the next pipeline stage; returns what was handed over."""
        ...
