"""What a planner must know of a decoder: its matrices, how ranks split them, and what attention keeps of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from builder.planner.attention import Attention
from quantize.architectures import Role

Split = Literal["columns", "rows", "kv_heads", "none"]
"""How tensor parallelism cuts a matrix, as Megatron-LM says it (arXiv 1909.08053): "columns" are its outputs, "rows"
its inputs; "kv_heads" its outputs by key-value heads, which are copied where there are more ranks than heads."""


@dataclass(frozen=True)
class Matrix:
    """One weight [out_features, in_features], or ``count`` of them that are the experts of a layer."""

    name: str  # within its decoder layer; "{}" stands for the number of the expert
    out_features: int
    in_features: int
    split: Split = "none"
    role: Role = "linear"
    has_bias: bool = False
    count: int = 1
    active: int = 1  # how many of ``count`` a token is multiplied with

    @property
    def num_weights(self) -> int:
        return self.count * self.out_features * self.in_features

    @property
    def num_biases(self) -> int:
        return self.count * self.out_features if self.has_bias else 0

    def names(self, prefix: str) -> Iterator[str]:
        """Of the checkpoint's tensors, behind ``prefix``."""
        return (f"{prefix}{self.name.format(index)}.weight" for index in range(self.count))


@dataclass(frozen=True)
class LayerShape:
    matrices: tuple[Matrix, ...]
    num_norm_weights: int
    attention: Attention

    @property
    def num_parameters(self) -> int:
        return self.num_norm_weights + sum(matrix.num_weights + matrix.num_biases for matrix in self.matrices)

    @property
    def num_active_parameters(self) -> int:
        idle = sum((m.count - m.active) * (m.num_weights + m.num_biases) // m.count for m in self.matrices)
        return self.num_parameters - idle


@dataclass(frozen=True)
class DecoderShape:
    """Sizes in elements."""

    model_type: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerShape, ...]
    is_tied: bool  # the output head is the embedding matrix
    why_not_built: str | None = None  # None: ``plansmith build`` knows the architecture

    @property
    def embeddings(self) -> Matrix:
        # Split by vocabulary: a rank looks up the tokens that it has, and the sum over ranks is the embedding.
        return Matrix("model.embed_tokens", self.vocab_size, self.hidden_size, "columns", "embeddings")

    @property
    def lm_head(self) -> Matrix:
        name = "model.embed_tokens" if self.is_tied else "lm_head"
        return Matrix(name, self.vocab_size, self.hidden_size, "columns", "embeddings" if self.is_tied else "lm_head")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        heads = 1 if self.is_tied else 2
        layers = sum(layer.num_parameters for layer in self.layers)
        return heads * prod((self.vocab_size, self.hidden_size)) + layers + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """What one token is multiplied with, embeddings included."""
        idle = sum(layer.num_parameters - layer.num_active_parameters for layer in self.layers)
        return self.num_parameters - idle

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1

    @property
    def num_experts(self) -> int:
        """Of one layer; 1 where there are none."""
        return max(matrix.count for layer in self.layers for matrix in layer.matrices)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads
