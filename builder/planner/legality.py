"""Over which numbers of ranks a decoder can be spread, whether or not it can be built yet."""

from __future__ import annotations

from collections.abc import Iterator

from builder.parallel import Parallelism
from builder.planner.attention import Attention, GroupedQueryAttention
from builder.planner.decoder_shape import DecoderShape, Matrix, Split
from builder.planner.local import local_matrix
from builder.planner.precision import Precision
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK, WeightRule


def obstacle(shape: DecoderShape, precision: Precision, parallelism: Parallelism) -> str | None:
    """Why the decoder cannot be spread so; None where it can."""
    return next(_obstacles(shape, precision, parallelism), None)


def legal_tp_sizes(shape: DecoderShape, precision: Precision, largest: int) -> list[int]:
    """With whole experts on each rank or with parts of them."""
    return [
        tp_size
        for tp_size in range(1, largest + 1)
        if any(
            obstacle(shape, precision, Parallelism(tp_size, 1, ep_size)) is None
            for ep_size in expert_sizes(shape, tp_size)
        )
    ]


def expert_sizes(shape: DecoderShape, tp_size: int) -> list[int]:
    """Expert-parallel sizes that are worth a line: every expert split over all ranks, and each whole on one."""
    return [1, tp_size] if shape.has_experts and tp_size > 1 and shape.num_experts % tp_size == 0 else [1]


def _obstacles(shape: DecoderShape, precision: Precision, parallelism: Parallelism) -> Iterator[str]:
    tp_size, pp_size, ep_size = parallelism.tp_size, parallelism.pp_size, parallelism.ep_size
    if pp_size > shape.num_layers:
        yield f"pp_size {pp_size}: the model has {shape.num_layers} layers"
    if ep_size > 1 and (tp_size % ep_size or not shape.has_experts or shape.num_experts % ep_size):
        yield f"ep_size {ep_size}: must divide tp_size {tp_size} and the {shape.num_experts} experts of a layer"
        return
    attention = shape.layers[0].attention
    if attention.num_heads % tp_size:
        yield f"tp_size {tp_size}: {attention.num_heads} attention heads are no multiple of it"
    if isinstance(attention, GroupedQueryAttention):
        heads = attention.num_kv_heads
        if heads % tp_size and tp_size % heads:
            yield f"tp_size {tp_size}: {heads} key-value heads are neither a multiple nor a divisor of it"
    if shape.vocab_size % tp_size:
        yield f"tp_size {tp_size}: the vocabulary of {shape.vocab_size} is no multiple of it"
    yield from _matrix_obstacles(shape, precision, parallelism)


def _matrix_obstacles(shape: DecoderShape, precision: Precision, parallelism: Parallelism) -> Iterator[str]:
    seen: set[Matrix] = set()
    for index, layer in enumerate(shape.layers):
        for matrix in layer.matrices:
            # One layer stands for all that are alike, as far as a recipe treats them alike.
            if matrix in seen or matrix.split == "none":
                continue
            if not precision.differs_by_name:
                seen.add(matrix)
            yield from _split_obstacles(matrix, index, layer.attention, precision, parallelism)


def _split_obstacles(
    matrix: Matrix, index: int, attention: Attention, precision: Precision, parallelism: Parallelism
) -> Iterator[str]:
    parts = parallelism.tp_size // (parallelism.ep_size if matrix.count > 1 else 1)
    name = next(matrix.names(f"model.layers.{index}."))
    whole = matrix.in_features if matrix.split == "rows" else matrix.out_features
    if matrix.split != "kv_heads" and whole % parts:
        yield f"tp_size {parallelism.tp_size}: {name} has {whole} {matrix.split}, no multiple of {parts}"
        return
    part = local_matrix(matrix, parallelism, attention)
    size = part.in_features if matrix.split == "rows" else part.out_features
    rule = precision.rule(name, matrix.role)
    step = _group_length(rule, matrix.split)
    if size != whole and not _leaves_groups_whole(rule, step, size):
        yield f"tp_size {parallelism.tp_size}: a rank's {size} of {name} tear {rule.scheme} groups of {step}"


def _group_length(rule: WeightRule, split: Split) -> int:
    """How many neighbours along the split share a scale; 1 where a scale serves any part of them."""
    if rule.scheme == "fp8" and rule.granularity == "block":
        return FP8_BLOCK
    if split != "rows":
        return 1
    if rule.int4 is not None:
        return max(rule.int4.group_size, 1)  # 0: a scale for each row
    return BLOCK_SIZES.get(rule.scheme, 1)


def _leaves_groups_whole(rule: WeightRule, step: int, size: int) -> bool:
    """A part holds whole groups, or lies within one and takes its scale along, as builder.sharding cuts."""
    return size % step == 0 or (step % size == 0 and rule.scheme in ("int4", "fp8"))
