"""How much memory the build of one rank takes, estimated before it starts."""

from __future__ import annotations

from math import prod

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Rank
from builder.sharding.slices import FOUR_BITS
from builder.sharding.weights import ShardedWeights

_FLOAT_BYTES = 2  # of floats in a plan, whatever the checkpoint stores
# GiB, and times the bytes of weights: a line above the peaks of TensorRT for RTX 1.7.1 (docs/many-gpus.md). The builder
# copies weights, and unpacks those of four bits.
_BASE = {"embedded": 0.8, "external": 1.3}
_WIDE = {"embedded": 1.8, "external": 1.0}
_FOUR_BITS = {"embedded": 3.0, "external": 1.0}


def build_memory(weights: WeightSource, spec: ModelSpec, rank: Rank, *, embedded: bool) -> int:
    """Resident bytes at most of the process that builds ``rank``; ``embedded``: its weights go into the plan."""
    place = "embedded" if embedded else "external"
    wide, four_bits = rank_bytes(weights, spec, rank)
    return int(_BASE[place] * 2**30 + _WIDE[place] * wide + _FOUR_BITS[place] * four_bits)


def rank_bytes(weights: WeightSource, spec: ModelSpec, rank: Rank) -> tuple[int, int]:
    """Bytes of the weights of ``rank`` as a plan holds them: those of eight bits or more, and those of four.

    Nothing but headers is read of a mapped checkpoint.
    """
    sharded = ShardedWeights(weights, spec, rank)
    if not weights.is_quantized:
        return sum(prod(shape) for shape in sharded.shapes.values()) * _FLOAT_BYTES, 0
    wide = four_bits = 0
    for name, shape in sharded.shapes.items():
        weight = sharded.stored(name) if len(shape) == 2 else None
        if weight is None or weight.scheme == "none":
            wide += prod(shape) * _FLOAT_BYTES
        elif weight.scheme in FOUR_BITS:
            four_bits += weight.nbytes
        else:
            wide += weight.nbytes
    return wide, four_bits
