"""Sparse MLPs: a router gives each token to some of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from builder.network.ops import NetworkOps, T
from builder.parallel import Rank
from quantize.mixture import Expert, Mixture


def sparse_mlp(ops: NetworkOps[T], mixture: Mixture, rank: Rank, layer_prefix: str, x: T) -> T:
    """The sum of what a token's experts make of it, by their weights: [num_tokens, hidden_size].

    Every rank routes among all experts and computes its own.
    """
    scores = ops.linear(x, f"{layer_prefix}{mixture.router}.weight")
    shares = ops.route(scores, mixture.experts_per_token, normalizes=mixture.normalizes)
    held = rank.experts(mixture.num_experts)
    if len(held) < mixture.num_experts:
        shares = ops.columns(shares, held.start, held.stop)
    experts: list[Callable[[T], T]] = [partial(_expert, ops, layer_prefix, mixture.expert(index)) for index in held]
    return ops.mix_experts(x, shares, experts)


def _expert(ops: NetworkOps[T], layer_prefix: str, expert: Expert, x: T) -> T:
    gate, up, down = (f"{layer_prefix}{module}.weight" for module in expert)
    return ops.linear(ops.multiply(ops.silu(ops.linear(x, gate)), ops.linear(x, up)), down)
