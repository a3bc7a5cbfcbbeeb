"""How much memory the build of one rank takes, estimated before it starts."""

from __future__ import annotations

from math import prod

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Rank
from builder.sharding.weights import ShardedWeights

_FLOAT_BYTES = 2  # of floats in a plan, whatever the checkpoint stores
# Peaks that were measured with TensorRT for RTX 1.7.1 over plans of 0.7 to 2.1 GiB: a line above all of them. The
# builder holds the weights several times over while it lays them out for each GPU.
_EMBEDDED = (1.4, 3.7)  # GiB, and times the weights' bytes
_EXTERNAL = (2.0, 0.6)


def build_memory(weights: WeightSource, spec: ModelSpec, rank: Rank, *, embedded: bool) -> int:
    """Resident bytes at most of the process that builds ``rank``; ``embedded``: its weights go into the plans."""
    base, factor = _EMBEDDED if embedded else _EXTERNAL
    return int(base * 2**30 + factor * rank_bytes(weights, spec, rank))


def rank_bytes(weights: WeightSource, spec: ModelSpec, rank: Rank) -> int:
    """Bytes of the weights of ``rank`` as a plan holds them. Nothing but headers is read of a mapped checkpoint."""
    sharded = ShardedWeights(weights, spec, rank)
    if not weights.is_quantized:
        return sum(prod(shape) for shape in sharded.shapes.values()) * _FLOAT_BYTES
    return sum(_stored_bytes(sharded, name, shape) for name, shape in sharded.shapes.items())


def _stored_bytes(weights: ShardedWeights, name: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 1:
        return shape[0] * _FLOAT_BYTES
    weight = weights.stored(name)
    return prod(shape) * _FLOAT_BYTES if weight.scheme == "none" else weight.nbytes
