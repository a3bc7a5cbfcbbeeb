"""OpenVINO's PagedAttention operation: made for each layer, serialized, and made anew when an engine is loaded.

The operation is written to the IR like any other, but its reader does not know it in this release. So the IR is read
with a stand-in of the same name, which is then replaced by the real operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.network.ops import AttentionSpec

if TYPE_CHECKING:
    from openvino import Core, Model, Node, Type

TOKENS_PER_BLOCK = 32  # fixed by the CPU kernel


class StepParameters:
    """Inputs of the compiled model. Those of the step contract keep its names, the others are PagedAttention's."""

    def __init__(self) -> None:
        from openvino import Type

        self.input_ids = _parameter("input_ids", Type.i64, [-1])
        self.position_ids = _parameter("position_ids", Type.i64, [-1])
        self.logits_indices = _parameter("logits_indices", Type.i64, [-1])
        self.past_lens = _parameter("past_lens", Type.i32, [-1])
        self.subsequence_begins = _parameter("subsequence_begins", Type.i32, [-1])
        self.block_indices = _parameter("block_indices", Type.i32, [-1])
        self.block_indices_begins = _parameter("block_indices_begins", Type.i32, [-1])
        self.max_context_len = _parameter("max_context_len", Type.i32, [])
        self.caches: list[Node] = []

    def add_caches(self, layer: int) -> tuple[Node, Node]:
        """KV pools of a layer. Type and shape are the plugin's choice and known after compilation."""
        from openvino import Type

        pair = tuple(_parameter(f"{kind}_cache.{layer}", Type.dynamic, [-1, -1, -1, -1]) for kind in ("key", "value"))
        self.caches += pair
        return pair[0], pair[1]

    def all(self) -> list[Node]:
        return [value for value in vars(self).values() if not isinstance(value, list)] + self.caches


def paged_attention_node(parameters: StepParameters, q: Node, k: Node, v: Node, attention: AttentionSpec) -> Node:
    """Attend; q, k, v are [num_tokens, heads, 1, head_dim], the result is [num_tokens, 1, num_heads * head_dim]."""
    from openvino import opset15 as op

    key_cache, value_cache = parameters.add_caches(attention.layer)
    tokens = [
        _merge_heads(q, attention.num_heads, attention),
        *(_merge_heads(x, attention.num_kv_heads, attention) for x in (k, v)),
    ]
    inputs = [
        *tokens,
        key_cache,
        value_cache,
        parameters.past_lens,
        parameters.subsequence_begins,
        parameters.block_indices,
        parameters.block_indices_begins,
        _constant(np.float32(attention.scale)),
        _constant(np.int32(attention.sliding_window or 0)),
        _constant(np.zeros(0, np.float32)),  # alibi_slopes
        parameters.max_context_len,
        *_unused_inputs(),
    ]
    node = _make([value.output(0) for value in inputs], attention)
    node.set_friendly_name(f"model.layers.{attention.layer}.self_attn")
    return op.unsqueeze(node.output(0), np.array([1], np.int64))


def restore_attention(model: Model, attentions: list[AttentionSpec]) -> None:
    """Replace each stand-in by the real operation, in place."""
    by_name = {f"model.layers.{attention.layer}.self_attn": attention for attention in attentions}
    for stand_in in [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]:
        attention = by_name.pop(stand_in.get_friendly_name())
        node = _make([value.get_source_output() for value in stand_in.inputs()], attention)
        node.set_friendly_name(stand_in.get_friendly_name())
        for target in stand_in.output(0).get_target_inputs():
            target.replace_source_output(node.output(0))


def register_stand_in(core: Core) -> None:
    """Let ``core`` read an IR that holds PagedAttention."""
    core.add_extension(_stand_in_class())


def _make(inputs: list[Any], attention: AttentionSpec) -> Node:
    from openvino.op import _PagedAttentionExtension

    node = _PagedAttentionExtension(inputs)
    info = node.get_rt_info()  # the plugin derives the shapes of the pools from these
    info["num_k_heads"] = info["num_v_heads"] = attention.num_kv_heads
    info["k_head_size"] = info["v_head_size"] = attention.head_dim
    return node


def _merge_heads(x: Node, num_heads: int, attention: AttentionSpec) -> Node:
    from openvino import opset15 as op

    in_order = op.transpose(x, np.array([0, 2, 1, 3], np.int64))
    return op.reshape(in_order, np.array([-1, num_heads * attention.head_dim], np.int64), False)


def _unused_inputs() -> list[Node]:
    """Score aggregation, cache rotation, sparse attention, sinks, adaptive eviction, quantized-key groups: all off."""
    none_i32, zero_i32 = np.zeros(0, np.int32), np.int32(0)
    none_f32 = np.zeros(0, np.float32)
    values: list[Any] = [none_i32, none_i32, none_i32, none_f32, none_f32, zero_i32, zero_i32]
    values += [np.zeros((0, 0, 0, 0), np.float32), zero_i32, none_i32, none_i32, none_i32, none_i32]
    values += [np.zeros(0, np.uint8), none_i32]
    return [_constant(value) for value in values]


def _parameter(name: str, dtype: Type, shape: list[int]) -> Node:
    from openvino import PartialShape
    from openvino import opset15 as op

    node = op.parameter(PartialShape(shape), dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _constant(value: Any) -> Node:
    from openvino import opset15 as op

    return op.constant(value)


def _stand_in_class() -> type:
    from openvino import DiscreteTypeInfo, Op, PartialShape, Type

    class PagedAttentionStandIn(Op):  # type: ignore[misc]  # Op has no type information
        class_type_info = DiscreteTypeInfo("PagedAttentionExtension", "extension")

        def __init__(self, inputs: Any = None) -> None:
            super().__init__(self)
            if inputs is not None:
                self.set_arguments(inputs)
                self.constructor_validate_and_infer_types()

        def validate_and_infer_types(self) -> None:
            self.set_output_size(3)
            self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))
            for unused in (1, 2):
                self.set_output_type(unused, Type.f32, PartialShape([-1]))

        def clone_with_new_inputs(self, new_inputs: Any) -> PagedAttentionStandIn:
            return PagedAttentionStandIn(new_inputs)

        def get_type_info(self) -> DiscreteTypeInfo:
            return self.class_type_info

        def visit_attributes(self, visitor: Any) -> bool:
            return True

    return PagedAttentionStandIn
