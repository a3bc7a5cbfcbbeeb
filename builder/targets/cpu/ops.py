"""NetworkOps as OpenVINO graph nodes.

Every token is a batch row of length one: activations are [num_tokens, 1, features] and heads
[num_tokens, num_heads, 1, head_dim], the shapes in which the plugin's RMSNorm and RoPE fusions find their patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from builder.model_spec import ModelSpec
from builder.network.ops import AttentionSpec
from builder.network.weights import WeightSource
from builder.rope import rope_frequencies
from builder.rope_spec import RopeSpec
from builder.targets.cpu.attention import StepParameters, paged_attention_node
from builder.targets.cpu.constants import named, weight_node
from builder.targets.cpu.moe import mix_experts, route
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from openvino import Node


class OpenVinoOps:
    """Implements NetworkOps[openvino.Node]. ``on_weight`` is told the name of each weight that is added."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        max_seq_len: int,
        keep_float32: bool,
        on_weight: Callable[[str], None],
    ) -> None:
        self.parameters = StepParameters()
        self._spec = spec
        self._weights = weights
        self._max_seq_len = max_seq_len
        self._keep_float32 = keep_float32
        self._on_weight = on_weight
        self._matrices: dict[str, Node] = {}
        self._multipliers: dict[str, Node] = {}  # of the inputs of linears
        self._tables: dict[RopeSpec, tuple[Node, Node]] = {}
        self.activations: set[str] = set()  # that the checkpoint asks for and this target leaves in floats

    def embedding(self, weight: str) -> Node:
        from openvino import opset15 as op

        ids = op.unsqueeze(op.convert(self.parameters.input_ids, "i32"), _i64([1]))
        return op.gather(self._matrix(weight), ids, np.int32(0))

    def linear(self, x: Node, weight: str, bias: str | None = None) -> Node:
        from openvino import opset15 as op

        matrix, multiplier = self._matrix(weight), self._multipliers.get(weight)
        x = x if multiplier is None else op.multiply(x, multiplier)
        product = op.matmul(x, matrix, False, True)
        product.set_friendly_name(weight)
        return product if bias is None else op.add(product, self._vector(bias))

    def row_linear(self, x: Node, weight: str, bias: str | None = None) -> Node:
        return self.linear(x, weight, bias)

    def lm_head(self, x: Node, weight: str) -> Node:
        return self.linear(x, weight)

    def rms_norm(self, x: Node, weight: str, eps: float) -> Node:
        from openvino import opset15 as op

        variance = op.reduce_mean(op.power(x, np.float32(2)), _i64([-1]), True)
        inverse = op.divide(np.float32(1), op.sqrt(op.add(variance, np.float32(eps))))
        return op.multiply(op.multiply(x, inverse), self._vector(weight))

    def split_heads(self, x: Node, num_heads: int) -> Node:
        from openvino import opset15 as op

        heads = op.reshape(x, _i64([0, 0, num_heads, self._spec.head_dim]), True)
        return op.transpose(heads, _i64([0, 2, 1, 3]))

    def rope(self, x: Node, layer: int) -> Node:
        from openvino import opset15 as op

        rope = self._spec.rope_of(layer)
        width, end = rope.rotary_dim(self._spec.head_dim), 2**63 - 1
        if width < self._spec.head_dim:
            kept = op.slice(x, _i64([width]), _i64([end]), _i64([1]), _i64([3]))
            turning = op.slice(x, _i64([0]), _i64([width]), _i64([1]), _i64([3]))
            return op.concat([self._turned(turning, rope), kept], -1)
        return self._turned(x, rope)

    def _turned(self, x: Node, rope: RopeSpec) -> Node:
        from openvino import opset15 as op

        half, end = rope.rotary_dim(self._spec.head_dim) // 2, 2**63 - 1
        upper = op.slice(x, _i64([half]), _i64([end]), _i64([1]), _i64([3]))
        lower = op.slice(x, _i64([0]), _i64([half]), _i64([1]), _i64([3]))
        rotated = op.concat([op.multiply(upper, np.float32(-1)), lower], -1)
        cos, sin = self._cos_sin(rope)
        return op.add(op.multiply(x, cos), op.multiply(rotated, sin))

    def paged_attention(self, q: Node, k: Node, v: Node, attention: AttentionSpec) -> Node:
        return paged_attention_node(self.parameters, q, k, v, attention)

    def add(self, a: Node, b: Node) -> Node:
        from openvino import opset15 as op

        return op.add(a, b)

    def multiply(self, a: Node, b: Node) -> Node:
        from openvino import opset15 as op

        return op.multiply(a, b)

    def silu(self, x: Node) -> Node:
        from openvino import opset15 as op

        return op.swish(x)

    def gelu_tanh(self, x: Node) -> Node:
        from openvino import opset15 as op

        return op.gelu(x, "TANH")

    def scale(self, x: Node, factor: float) -> Node:
        from openvino import opset15 as op

        return op.multiply(x, np.float32(factor))

    def soft_cap(self, x: Node, cap: float) -> Node:
        from openvino import opset15 as op

        return op.multiply(op.tanh(op.multiply(x, np.float32(1 / cap))), np.float32(cap))

    def route(self, scores: Node, experts_per_token: int, *, normalizes: bool) -> Node:
        return route(scores, experts_per_token, normalizes=normalizes)

    def columns(self, x: Node, begin: int, end: int) -> Node:
        from openvino import opset15 as op

        return op.slice(x, _i64([begin]), _i64([end]), _i64([1]), _i64([-1]))

    def mix_experts(self, x: Node, shares: Node, experts: Sequence[Callable[[Node], Node]]) -> Node:
        return mix_experts(x, shares, experts)

    def gather_logits_rows(self, x: Node) -> Node:
        from openvino import opset15 as op

        return op.gather(x, self.parameters.logits_indices, np.int64(0))

    def receive_hidden(self) -> Node:
        raise _one_stage()

    def send_hidden(self, x: Node) -> Node:
        raise _one_stage()

    def _cos_sin(self, rope: RopeSpec) -> tuple[Node, Node]:
        """Cosines and sines [num_tokens, 1, 1, rotary_dim] of the step's positions, shared by layers."""
        if rope not in self._tables:
            self._tables[rope] = self._make_cos_sin(rope)
        return self._tables[rope]

    def _make_cos_sin(self, rope: RopeSpec) -> tuple[Node, Node]:
        from openvino import opset15 as op

        inverse, factor = rope_frequencies(rope, self._spec.head_dim, self._max_seq_len)
        name = "rope.inverse_frequencies" if rope == self._spec.rope else "local_rope.inverse_frequencies"
        positions = op.convert(op.unsqueeze(self.parameters.position_ids, _i64([1, 2])), "f32")
        angles = op.matmul(positions, named(inverse.reshape(1, 1, -1), name), False, False)
        angles = op.unsqueeze(op.concat([angles, angles], -1), _i64([1]))
        cos, sin = op.cos(angles), op.sin(angles)
        if factor == 1.0:
            return cos, sin
        return op.multiply(cos, np.float32(factor)), op.multiply(sin, np.float32(factor))

    def _matrix(self, name: str) -> Node:
        # One constant for a tied embedding and lm_head.
        if name not in self._matrices:
            self._on_weight(name)
            weight = self._weights.matrix(name)
            self._matrices[name] = weight_node(weight, name, keep_float32=self._keep_float32)
            if weight.activations is not None:
                self.activations.add(str(weight.activations))
            if weight.pre_quant_scale is not None:
                values = np.ascontiguousarray(weight.pre_quant_scale).reshape(1, 1, -1)
                self._multipliers[name] = named(values, name.removesuffix(".weight") + ".pre_quant_scale")
        return self._matrices[name]

    def _vector(self, name: str) -> Node:
        return named(self._weights.vector(name).reshape(1, 1, -1), name)


def _i64(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def _one_stage() -> BuildError:
    return BuildError("the cpu target computes the whole model on one rank; set build.pp_size to 1")
