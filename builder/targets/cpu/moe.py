"""Experts as OpenVINO nodes. Every expert sees every token, and the share of those not chosen is zero.

Right for any number of tokens and with static shapes, but the work is that of all experts: num_experts /
experts_per_token times what the chosen ones alone would take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from openvino import Node


def route(scores: Node, experts_per_token: int, *, normalizes: bool) -> Node:
    """[num_tokens, 1, num_experts] to shares of the same shape."""
    from openvino import opset15 as op

    shares = op.softmax(scores, 2)
    # One that is the k-th best is found by its place, not by its value: two experts may have the same.
    best = op.topk(shares, np.int32(experts_per_token), 2, "max", "value", "i32")
    values = best.output(0)
    if normalizes:
        values = op.divide(values, op.reduce_sum(values, np.array([2], np.int64), True))
    nothing = op.multiply(shares, np.float32(0))
    return op.scatter_elements_update(nothing, best.output(1), values, np.int32(2))


def mix_experts(x: Node, shares: Node, experts: Sequence[Callable[[Node], Node]]) -> Node:
    """``x`` [num_tokens, 1, hidden_size] and ``shares`` [num_tokens, 1, num_experts] to the shape of ``x``."""
    from openvino import opset15 as op

    columns = op.split(shares, np.int64(2), len(experts)).outputs()
    parts = [op.multiply(expert(x), column) for expert, column in zip(experts, columns, strict=True)]
    return reduce(op.add, parts)
