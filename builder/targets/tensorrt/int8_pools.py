"""Pools of keys and values in eight bits.

KVCacheUpdate takes floats alone, so new values are scattered. ``key_pool.N`` and ``value_pool.N`` are int8 and, as all
pools, bound to the same memory as their outputs ``key_pool_out.N`` and ``value_pool_out.N``. A plan may nevertheless
copy a pool onto itself in each step; half the bytes of a key are bought with that traffic.

A checkpoint that was calibrated for int8 has one scale for the keys of a layer and one for its values. Otherwise each
token of each head has its own, found as it is written, in ``key_scale_pool.N`` and ``value_scale_pool.N``: float32
[num_blocks, kv_heads, tokens_per_block, 1].
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.inputs import StepTensors
from builder.targets.tensorrt.kv_pools import gather_pages, update_in_place
from builder.targets.tensorrt.weights import WeightTensors

_LARGEST = 127.0
_SMALLEST_SCALE = 1e-12  # of a token of zeros


class Int8Pools:
    """Implements KvPools."""

    def __init__(
        self, graph: Graph, step: StepTensors, weights: WeightTensors, num_kv_heads: int, head_dim: int
    ) -> None:
        self._graph = graph
        self._step = step
        self._weights = weights
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        key_scale, value_scale = self._weights.kv_scales(layer) or (None, None)
        return self._update("key", k, layer, key_scale), self._update("value", v, layer, value_scale)

    def _update(self, kind: str, new: Tensor, layer: int, scale: Tensor | None) -> Tensor:
        if scale is not None:
            codes = self._graph.quantize(new, scale, "int8")
            return self._graph.dequantize(self._scatter(f"{kind}_pool", codes, layer), scale)
        graph, one = self._graph, self._graph.literal(1.0, "float32")
        exact = graph.cast(new, "float32")
        own = graph.scaled(graph.reduce_last(graph.unary(exact, "ABS"), "MAX"), 1 / _LARGEST)
        own = graph.elementwise(own, graph.full(own, _SMALLEST_SCALE, "float32"), "MAX")
        codes = graph.quantize(graph.divide(exact, own), one, "int8")
        values = graph.dequantize(self._scatter(f"{kind}_pool", codes, layer), one)
        scales = update_in_place(graph, self._step, f"{kind}_scale_pool", own, layer)
        return graph.multiply(values, graph.cast(gather_pages(graph, self._step, scales)))

    def _scatter(self, name: str, codes: Tensor, layer: int) -> Tensor:
        """Write [num_tokens, kv_heads, head_dim]; return each row's codes."""
        graph, trt = self._graph, self._graph.trt
        pool = self._step.pool(f"{name}.{layer}", "int8", self._head_dim)
        layer_ = graph.added(graph.network.add_scatter(pool, self._places, codes, trt.ScatterMode.ND))
        written = layer_.get_output(0)
        graph.output(written, f"{name}_out.{layer}")
        return gather_pages(graph, self._step, written)

    @cached_property
    def _places(self) -> Tensor:
        """[num_tokens, kv_heads, 3]: page, head and place within the page."""
        graph, size = self._graph, self._step.tokens_per_block
        slots = graph.shuffle(self._step.token_slots, (-1, 1, 1))
        pages = graph.divide(slots, graph.full(slots, size, "int32"))
        offsets = graph.subtract(slots, graph.multiply(pages, graph.full(pages, size, "int32")))
        heads = graph.literal(np.arange(self._num_kv_heads).reshape(1, -1, 1), "int32")
        none, nothing = graph.subtract(heads, heads), graph.subtract(slots, slots)
        return graph.concatenate([graph.add(pages, none), graph.add(nothing, heads), graph.add(offsets, none)], axis=2)
