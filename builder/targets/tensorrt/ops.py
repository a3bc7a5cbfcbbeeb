"""NetworkOps as layers of a TensorRT network.

Activations are [num_tokens, features] or [num_tokens, heads, head_dim] of the network's dtype; norms, routing and
logits are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from builder.model_spec import ModelSpec
from builder.network.ops import AttentionSpec
from builder.parallel import Rank
from builder.rope import rope_frequencies
from builder.rope_spec import RopeSpec
from builder.targets.tensorrt import moe
from builder.targets.tensorrt.activations import multiply_inputs
from builder.targets.tensorrt.attention import PagedAttention, soft_cap
from builder.targets.tensorrt.collectives import Collectives
from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.inputs import StepTensors
from builder.targets.tensorrt.payload import float_payload
from builder.targets.tensorrt.weights import WeightTensors


class TensorRtOps:
    """Implements NetworkOps[ITensor] for one rank."""

    def __init__(
        self,
        graph: Graph,
        spec: ModelSpec,
        weights: WeightTensors,
        step: StepTensors,
        attention: PagedAttention,
        rank: Rank,
        max_seq_len: int,
    ) -> None:
        self._graph = graph
        self._spec = spec
        self._weights = weights
        self._step = step
        self._attention = attention
        self._rank = rank
        self._max_seq_len = max_seq_len
        self._layer = 0  # whose attention was made last
        self._collectives = Collectives(graph, rank)
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}

    def embedding(self, weight: str) -> Tensor:
        graph, matrix = self._graph, self._weights.matrix(weight)
        ids = self._step.input_ids
        if self._rank.parallelism.tp_size == 1:
            return graph.gather(matrix.tensor, ids)
        rows = matrix.stored.shape[0]
        local = graph.subtract(ids, graph.literal([self._rank.tp_rank * rows], "int32"))
        first, last = graph.literal([0], "int32"), graph.literal([rows - 1], "int32")
        clipped = graph.elementwise(graph.elementwise(local, first, "MAX"), last, "MIN")
        is_own = graph.shuffle(graph.elementwise(local, clipped, "EQUAL"), (-1, 1))
        found = graph.gather(matrix.tensor, clipped)
        own = graph.select(is_own, found, graph.full(found, 0.0))
        return self._collectives.all_reduce(own, weight.removesuffix(".weight"))

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        return self._with_bias(self._product(x, weight, weight.removesuffix(".weight")), bias)

    def row_linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        module = weight.removesuffix(".weight")
        return self._with_bias(self._collectives.all_reduce(self._product(x, weight, module), module), bias)

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        logits = self._graph.cast(self._product(x, weight, "lm_head"), "float32")
        return self._collectives.all_gather_last(logits, "lm_head")

    def rms_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        graph = self._graph
        exact = graph.cast(x, "float32")
        mean = graph.reduce_last(graph.multiply(exact, exact), "AVG")
        deviation = graph.unary(graph.add(mean, graph.full(mean, eps, "float32")), "SQRT")
        scaled = graph.multiply(graph.divide(exact, deviation), self._weights.vector(weight, len(x.shape)))
        return graph.cast(scaled)

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return self._graph.shuffle(x, (-1, num_heads, self._spec.head_dim))

    def rope(self, x: Tensor, layer: int) -> Tensor:
        graph, (_, num_heads, head_dim) = self._graph, x.shape
        rope = self._spec.rope_of(layer)
        cos, sin = self._cos_sin(rope)
        rotary_dim = rope.rotary_dim(head_dim) % head_dim  # 0: all features turn
        tokens = graph.shuffle(x, (-1, num_heads, 1, head_dim))  # each token a batch row of length 1
        rotated = graph.added(graph.network.add_rotary_embedding(tokens, cos, sin, False, rotary_dim))
        rotated.set_input(3, graph.shuffle(self._step.position_ids, (-1, 1)))
        return graph.shuffle(rotated.get_output(0), (-1, num_heads, head_dim))

    def paged_attention(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        self._layer = attention.layer
        return self._attention(q, k, v, attention)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._graph.add(a, b)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self._graph.multiply(a, b)

    def silu(self, x: Tensor) -> Tensor:
        return self._graph.multiply(x, self._graph.activation(x, "SIGMOID"))

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return self._graph.activation(x, "GELU_TANH")

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._graph.scaled(x, factor)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return soft_cap(self._graph, x, cap)

    def route(self, scores: Tensor, experts_per_token: int, *, normalizes: bool) -> Tensor:
        return moe.route(self._graph, scores, experts_per_token, normalizes=normalizes)

    def columns(self, x: Tensor, begin: int, end: int) -> Tensor:
        return moe.columns(self._graph, x, begin, end)

    def mix_experts(self, x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        mixed = moe.mix_experts(self._graph, x, shares, experts)
        return self._collectives.all_reduce(mixed, f"model.layers.{self._layer}.experts")

    def gather_logits_rows(self, x: Tensor) -> Tensor:
        return self._graph.gather(x, self._step.logits_indices)

    def receive_hidden(self) -> Tensor:
        return self._step.hidden_in

    def send_hidden(self, x: Tensor) -> Tensor:
        return x

    def _product(self, x: Tensor, weight: str, module: str) -> Tensor:
        graph, matrix = self._graph, self._weights.matrix(weight)
        return multiply_inputs(
            graph, x, matrix, lambda inputs: graph.matmul(inputs, matrix.tensor, module, transpose_b=True)
        )

    def _with_bias(self, x: Tensor, bias: str | None) -> Tensor:
        if bias is None:
            return x
        return self._graph.add(x, self._graph.cast(self._weights.vector(bias, len(x.shape))))

    def _cos_sin(self, rope: RopeSpec) -> tuple[Tensor, Tensor]:
        """Tables [max_seq_len, rotary_dim / 2] of the network's dtype, shared by all layers."""
        if rope not in self._tables:
            inverse, factor = rope_frequencies(rope, self._spec.head_dim, self._max_seq_len)
            angles = np.outer(np.arange(self._max_seq_len), inverse.astype(np.float64))
            number = len(self._tables)
            cos, sin = (
                self._graph.constant(f"rope.{number}.{name}", float_payload(table * factor, self._graph.dtype, name))
                for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles)))
            )
            self._tables[rope] = cos, sin
        return self._tables[rope]
