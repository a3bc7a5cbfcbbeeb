"""Attention over paged keys and values with TensorRT's own layers.

A page is one batch row of KVCacheUpdate, which writes the new tokens in place; pages are then gathered by the block
tables. Queries are padded to rows and masked by position, since no kernel takes ragged ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from builder.network.ops import AttentionSpec
from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.inputs import StepTensors
from builder.targets.tensorrt.kv_pools import KvPools

_HIDDEN = -1e30  # a score that softmax makes 0; an infinity would make NaN of a row that is all hidden


class PagedAttention:
    """Attention layers that share the step's tensors and masks."""

    def __init__(self, graph: Graph, step: StepTensors, pools: KvPools) -> None:
        self._graph = graph
        self._step = step
        self._pools = pools
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        """As NetworkOps.paged_attention."""
        keys, values = self._pools.update(k, v, attention.layer)
        queries = self._rows(q, attention)
        attend: Callable[..., Tensor] = self._fused if attention.soft_cap is None else self._primitive
        return self._tokens(attend(queries, keys, values, attention), attention)

    def _rows(self, q: Tensor, attention: AttentionSpec) -> Tensor:
        """[num_tokens, num_heads, head_dim] to [num_rows, num_heads, queries, head_dim]."""
        rows = self._graph.gather(q, self._step.query_gather)
        return self._graph.shuffle(rows, first=(0, 2, 1, 3))

    def _tokens(self, attended: Tensor, attention: AttentionSpec) -> Tensor:
        """[num_rows, num_heads, queries, head_dim] to [num_tokens, num_heads * head_dim]."""
        features = attention.num_heads * attention.head_dim
        rows = self._graph.shuffle(attended, (-1, features), first=(0, 2, 1, 3))
        return self._graph.gather(rows, self._step.query_scatter)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        """IAttention: it has no scale of its own, and takes no mask beside its own causality."""
        graph, trt = self._graph, self._graph.trt
        scaled = graph.scaled(q, attention.scale)
        softmax, no_causality = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
        layer = graph.added(
            graph.network.add_attention_v2(scaled, k, v, softmax, no_causality),
            f"model.layers.{attention.layer}.self_attn",
        )
        # Where there is a fused kernel it is taken all the same (the plans are as large and take as much memory); of
        # float32, and of three query heads, there is none.
        layer.decomposable = True
        graph.set_checked(layer, "mask", self._mask(attention.sliding_window))
        return layer.get_output(0)

    def _primitive(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        """The same with capped scores, which IAttention lacks; scores and softmax in float32."""
        graph, group = self._graph, attention.num_heads // attention.num_kv_heads
        prefix = f"model.layers.{attention.layer}.self_attn"
        q = graph.shuffle(q, (0, attention.num_kv_heads, group, -1, attention.head_dim))
        k, v = (graph.shuffle(x, (0, attention.num_kv_heads, 1, -1, attention.head_dim)) for x in (k, v))
        scores = graph.cast(graph.matmul(q, k, f"{prefix}:scores", transpose_b=True), "float32")
        capped = soft_cap(graph, graph.scaled(scores, attention.scale), attention.soft_cap)
        mask = self._unsqueezed(self._mask(attention.sliding_window))
        shares = graph.softmax_last(graph.select(mask, capped, graph.full(capped, _HIDDEN, "float32")))
        attended = graph.matmul(graph.cast(shares), v, prefix)
        return graph.shuffle(attended, (0, attention.num_heads, -1, attention.head_dim))

    def _mask(self, window: int | None) -> Tensor:
        """[num_rows, 1, queries, keys]: true where a query sees a key."""
        if window not in self._masks:
            graph, keys, queries = self._graph, self._step.key_positions, self._step.query_positions
            mask = graph.elementwise(keys, self._after_queries, "LESS")
            if window is not None:
                last_hidden = graph.subtract(queries, graph.full(queries, window, "int32"))
                mask = graph.elementwise(mask, graph.elementwise(keys, last_hidden, "GREATER"), "AND")
            self._masks[window] = mask
        return self._masks[window]

    def _unsqueezed(self, mask: Tensor) -> Tensor:
        """[num_rows, 1, queries, keys] to [num_rows, 1, 1, queries, keys]."""
        axes = self._graph.literal([1], "int32")
        return self._graph.added(self._graph.network.add_unsqueeze(mask, axes)).get_output(0)

    @cached_property
    def _after_queries(self) -> Tensor:
        queries = self._step.query_positions
        return self._graph.add(queries, self._graph.full(queries, 1, "int32"))


def soft_cap(graph: Graph, x: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(x / cap)``; ``x`` itself without a cap."""
    if cap is None:
        return x
    return graph.scaled(graph.activation(graph.scaled(x, 1 / cap), "TANH"), cap)
