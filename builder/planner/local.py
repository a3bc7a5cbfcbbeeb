"""One rank's part of a matrix, its bytes as the quantized checkpoint stores them, and what a token costs there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from builder.parallel import Parallelism
from builder.planner.attention import Attention, GroupedQueryAttention
from builder.planner.decoder_shape import LayerShape, Matrix
from builder.planner.gpu import MathFormat
from builder.planner.precision import Precision
from plansmith_errors import QuantizeError
from quantize.checkpoint import TensorInfo
from quantize.sensitivity.sizes import expected_nbytes
from quantize.stored_specs import stored_specs
from quantize.weight_rule import WeightRule

_VECTOR_BYTES = 2  # norms and biases


@dataclass(frozen=True)
class LinearCost:
    """Matrices of one kind on one rank."""

    nbytes: int  # scales included
    flops: float  # for one token: 2 for each weight that it is multiplied with, on average over ranks
    share: float  # of the bytes that one token touches; below 1 for experts
    math: MathFormat

    def bytes_read(self, num_tokens: float) -> float:
        """By a step of ``num_tokens``: of experts, those that at least one token chooses, if all are as likely."""
        return self.nbytes if self.share >= 1 else self.nbytes * (1 - (1 - self.share) ** num_tokens)


@dataclass(frozen=True)
class LayerCost:
    """One decoder layer on one rank."""

    weight_bytes: int
    linears: tuple[LinearCost, ...]
    attention: Attention
    kv_elements: int  # that one token leaves in the cache
    attention_elements: int  # of activations of one token around attention
    mlp_elements: int  # and around the MLP


def local_matrix(matrix: Matrix, parallelism: Parallelism, attention: Attention | None = None) -> Matrix:
    """What one rank holds. Experts are spread over ``ep_size`` groups of ranks and split within each."""
    parts, count = parallelism.tp_size, matrix.count
    if count > 1:
        parts, count = parts // parallelism.ep_size, count // parallelism.ep_size
    out_features, in_features = matrix.out_features, matrix.in_features
    if matrix.split == "kv_heads" and isinstance(attention, GroupedQueryAttention):
        out_features = max(attention.num_kv_heads // parts, 1) * attention.head_dim
    elif matrix.split == "columns":
        out_features //= parts
    elif matrix.split == "rows":
        in_features //= parts
    return replace(matrix, out_features=out_features, in_features=in_features, count=count)


def layer_cost(shape: LayerShape, index: int, precision: Precision, parallelism: Parallelism) -> LayerCost:
    """Raises QuantizeError where a group or block of the recipe does not divide a rank's part."""
    attention, tp_size = shape.attention, parallelism.tp_size
    local = [(matrix, local_matrix(matrix, parallelism, attention)) for matrix in shape.matrices]
    linears = tuple(_linear_costs(local, f"model.layers.{index}.", precision))
    biases = sum(part.num_biases for _, part in local)
    return LayerCost(
        weight_bytes=sum(linear.nbytes for linear in linears) + _VECTOR_BYTES * (biases + shape.num_norm_weights),
        linears=linears,
        attention=attention,
        kv_elements=attention.kv_elements(tp_size),
        attention_elements=attention.activation_elements(tp_size),
        mlp_elements=max(_mlp_elements(part) for _, part in local),
    )


def matrix_cost(matrix: Matrix, name: str, precision: Precision, parallelism: Parallelism) -> LinearCost:
    """Of a matrix outside the layers."""
    part = local_matrix(matrix, parallelism)
    rule = precision.rule(name, matrix.role)
    nbytes = stored_bytes(name, part.out_features, part.in_features, rule, precision)
    return LinearCost(nbytes, 2.0 * part.num_weights, 1.0, precision.math(rule))


def _linear_costs(local: Iterable[tuple[Matrix, Matrix]], prefix: str, precision: Precision) -> Iterable[LinearCost]:
    for matrix, part in local:
        flops = 2.0 * matrix.active / matrix.count * part.num_weights
        share = matrix.active / matrix.count
        if not precision.differs_by_name:
            name = next(matrix.names(prefix))
            rule = precision.rule(name, matrix.role)
            nbytes = part.count * stored_bytes(name, part.out_features, part.in_features, rule, precision)
        else:
            rules = [(name, precision.rule(name, matrix.role)) for name in matrix.names(prefix)]
            rule = rules[0][1]
            sizes = (stored_bytes(name, part.out_features, part.in_features, one, precision) for name, one in rules)
            nbytes = sum(sizes) * part.count // matrix.count
        yield LinearCost(nbytes, flops, share, precision.math(rule))


def _mlp_elements(part: Matrix) -> int:
    """Gate, up and their product, each as wide as what the way down reads.

    Of experts also their outputs, which are summed up in float32; the network computes them side by side.
    """
    if part.split != "rows" or part.name.startswith("self_attn."):
        return 0
    return 3 * part.in_features if part.count == 1 else 3 * part.count * (part.in_features + part.out_features)


def stored_bytes(name: str, out_features: int, in_features: int, rule: WeightRule, precision: Precision) -> int:
    """Of a matrix of these sizes. Raises QuantizeError where a group or block does not divide it."""
    bits = _auto_bits(precision) if rule is precision.recipe.linears else None
    if bits is not None:
        return round(out_features * in_features * bits / 8)
    if rule.int4 is not None and rule.int4.group_size > in_features:
        rule = rule.model_copy(update={"group_size": "channel"})  # a part of one group keeps its scale
    return _bytes_by_rule(name, out_features, in_features, rule, precision.kept_dtype)


def _auto_bits(precision: Precision) -> float | None:
    """Bits per weight that an automatic choice may take for the linears; None where it is told otherwise."""
    auto = precision.recipe.auto
    return None if auto is None else auto.budget.bits_per_weight


def _bytes_by_rule(name: str, out_features: int, in_features: int, rule: WeightRule, kept_dtype: np.dtype[Any]) -> int:
    # Names matter in errors alone: the same sizes under the same rule are computed once.
    size = _cached_bytes(out_features, in_features, rule, kept_dtype)
    return size if size is not None else _specs_bytes(name, out_features, in_features, rule, kept_dtype)


@lru_cache(maxsize=4096)
def _cached_bytes(out_features: int, in_features: int, rule: WeightRule, kept_dtype: np.dtype[Any]) -> int | None:
    try:
        return _specs_bytes("", out_features, in_features, rule, kept_dtype)
    except QuantizeError:
        return None


def _specs_bytes(name: str, out_features: int, in_features: int, rule: WeightRule, kept_dtype: np.dtype[Any]) -> int:
    info = TensorInfo(name, kept_dtype.name, (out_features, in_features), 0)
    return expected_nbytes(stored_specs(info, rule, kept_dtype), rule.scheme)
