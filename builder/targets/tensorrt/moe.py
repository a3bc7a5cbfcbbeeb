"""Experts from primitives: AddMoE does not compile ahead of time.

Every expert computes every token, and the share of those that were not chosen is zero. Shapes are the step's alone, so
that it compiles everywhere. It costs num_experts / experts_per_token times the chosen experts' multiplications; a step
of many tokens reads all experts' weights in either form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from builder.targets.tensorrt.graph import Graph, Tensor


def route(graph: Graph, scores: Tensor, experts_per_token: int, *, normalizes: bool) -> Tensor:
    """As NetworkOps.route: the shares are float32."""
    trt = graph.trt
    shares = graph.softmax_last(graph.cast(scores, "float32"))
    best = graph.added(graph.network.add_topk(shares, trt.TopKOperation.MAX, experts_per_token, 1 << 1))
    values, indices = best.get_output(0), best.get_output(1)
    if normalizes:
        values = graph.divide(values, graph.reduce_last(values, "SUM"))
    # Chosen ones are placed by their index, not by comparing values: two experts may have the same.
    nothing = graph.multiply(shares, graph.full(shares, 0.0, "float32"))
    layer = graph.added(graph.network.add_scatter(nothing, indices, values, trt.ScatterMode.ELEMENT))
    layer.axis = 1
    return layer.get_output(0)


def mix_experts(graph: Graph, x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The sum over this rank's experts, of the network's dtype; it is made in float32."""
    parts = []
    for index, expert in enumerate(experts):
        share = columns(graph, shares, index, index + 1)
        parts.append(graph.multiply(graph.cast(expert(x), "float32"), share))
    return graph.cast(reduce(graph.add, parts))


def columns(graph: Graph, x: Tensor, begin: int, end: int) -> Tensor:
    """Columns ``begin:end`` of [num_tokens, features]."""
    indices = graph.literal(list(range(begin, end)), "int32")
    return graph.gather(x, indices, axis=1)
