"""A quantized checkpoint as OpenVINO GenAI wants it: our decoder and our constants, with GenAI's form of attention.

GenAI takes a stateful model, ScaledDotProductAttention over keys and values that are read from and assigned to
variables, and makes PagedAttention of it itself. All else is the graph that the CPU target builds, so both run the same
bits through the same operations.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset15 as op

from builder.model_spec import ModelSpec
from builder.network import AttentionSpec, decoder
from builder.network.weights import WeightSource
from builder.rope import rope_frequencies
from builder.targets.cpu.ops import OpenVinoOps
from quantize import open_checkpoint

Node = Any


class StatefulOps(OpenVinoOps):
    """Activations are [batch, length, features] and heads [batch, num_heads, length, head_dim]."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, max_seq_len: int) -> None:
        super().__init__(spec, weights, max_seq_len=max_seq_len, keep_float32=False, on_weight=lambda name: None)
        i64, i32 = openvino.Type.i64, openvino.Type.i32
        self.input_ids = _parameter("input_ids", i64, [-1, -1])
        self.attention_mask = _parameter("attention_mask", i64, [-1, -1])
        self.position_ids = _parameter("position_ids", i64, [-1, -1])
        self.beam_idx = _parameter("beam_idx", i32, [-1])
        self.assigns: list[Node] = []
        self._batch = op.gather(op.shape_of(self.input_ids, "i64"), _i64([0]), np.int64(0))

    def inputs(self) -> list[Node]:
        return [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]

    def embedding(self, weight: str) -> Node:
        return op.gather(self._matrix(weight), op.convert(self.input_ids, "i32"), np.int32(0))

    def gather_logits_rows(self, x: Node) -> Node:
        return x  # GenAI puts a Gather before the head itself

    def paged_attention(self, q: Node, k: Node, v: Node, attention: AttentionSpec) -> Node:
        keys, values = (self._cached(kind, new, attention) for kind, new in (("key", k), ("value", v)))
        attended = op.scaled_dot_product_attention(q, keys, values, self._mask, causal=False)
        return op.reshape(op.transpose(attended, np.array([0, 2, 1, 3], np.int32)), _i64([0, 0, -1]), True)

    def _cached(self, kind: str, new: Node, attention: AttentionSpec) -> Node:
        """``new`` behind what the variable holds, repeated for the query heads that share it."""
        num_heads, head_dim = attention.num_kv_heads, attention.head_dim
        name = f"past_key_values.{attention.layer}.{kind}present.{attention.layer}.{kind}"
        empty = op.broadcast(np.float32(0), self._shape([num_heads, 0, head_dim]))
        info = openvino.op.util.VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, num_heads, -1, head_dim]), openvino.Type.f32
        info.variable_id = name
        variable = openvino.op.util.Variable(info)
        past = op.gather(op.read_value(empty, variable), self.beam_idx, np.int64(0))
        cached = op.concat([past, new], 2)
        self.assigns.append(op.assign(cached, variable))
        repeats = attention.num_heads // num_heads
        if repeats == 1:
            return cached
        shape = self._shape([num_heads, repeats, 1, head_dim])
        repeated = op.broadcast(op.unsqueeze(cached, _i64([2])), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, _i64([0, attention.num_heads, -1, head_dim]), True)

    def _shape(self, rest: list[int]) -> Node:
        return op.concat([self._batch, _i64(rest)], 0)

    @cached_property
    def _mask(self) -> Node:
        """Additive mask [batch, 1, length, past and length]: causal, and nothing where the attention mask is 0."""
        total = op.squeeze(op.gather(op.shape_of(self.attention_mask, "i64"), _i64([1]), np.int64(0)), _i64([0]))
        length = op.squeeze(op.gather(op.shape_of(self.input_ids, "i64"), _i64([1]), np.int64(0)), _i64([0]))
        keys = op.range(np.int64(0), total, np.int64(1), "i64")
        queries = op.range(op.subtract(total, length), total, np.int64(1), "i64")
        causal = op.less_equal(op.unsqueeze(keys, _i64([0])), op.unsqueeze(queries, _i64([1])))
        real = op.unsqueeze(op.convert(self.attention_mask, "boolean"), _i64([1, 2]))
        allowed = op.logical_and(op.unsqueeze(causal, _i64([0, 1])), real)
        return op.select(allowed, np.float32(0), np.float32(-65504))

    @cached_property
    def _cos_sin(self) -> tuple[Node, Node]:
        inverse, factor = rope_frequencies(self._spec.rope, self._spec.head_dim, self._max_seq_len)
        positions = op.convert(op.unsqueeze(self.position_ids, _i64([2])), "f32")
        angles = op.matmul(positions, op.constant(inverse.reshape(1, 1, -1)), False, False)
        angles = op.unsqueeze(op.concat([angles, angles], -1), _i64([1]))
        return op.multiply(op.cos(angles), np.float32(factor)), op.multiply(op.sin(angles), np.float32(factor))


def write_genai_model(checkpoint_dir: Path, output: Path, max_seq_len: int) -> None:
    """Write model, tokenizer and configs for ``openvino_genai.ContinuousBatchingPipeline`` into ``output``."""
    from openvino_tokenizers import convert_tokenizer  # type: ignore[import-untyped]
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(checkpoint_dir)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    ops = StatefulOps(spec, WeightSource(checkpoint, spec), max_seq_len)
    logits = decoder(ops, spec)
    logits.output(0).get_tensor().set_names({"logits"})
    model = openvino.Model([op.result(logits.output(0))], ops.assigns, ops.inputs(), spec.model_type)
    openvino.save_model(model, output / "openvino_model.xml", compress_to_fp16=False)
    tokenizers = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint_dir), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), tokenizers, strict=True):
        openvino.save_model(part, output / f"openvino_{name}.xml")
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (output / "config.json").write_text(json.dumps(config))


def _parameter(name: str, dtype: Any, shape: list[int]) -> Node:
    node = op.parameter(openvino.PartialShape(shape), dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _i64(values: list[int]) -> Node:
    return op.constant(np.array(values, np.int64))
