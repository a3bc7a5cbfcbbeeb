"""Over which numbers of ranks a decoder can be spread, whether or not it can be built yet."""

from __future__ import annotations

from collections.abc import Iterator

from builder.parallel import Parallelism
from builder.planner.attention import GroupedQueryAttention
from builder.planner.decoder_shape import DecoderShape, Matrix
from builder.planner.local import local_matrix, stored_bytes
from builder.planner.precision import Precision
from plansmith_errors import QuantizeError
from quantize.recipe import FP8_BLOCK


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
            if matrix in seen or matrix.split in ("none", "kv_heads"):
                continue
            if not precision.differs_by_name:
                seen.add(matrix)
            yield from _split_obstacles(matrix, index, precision, parallelism)


def _split_obstacles(matrix: Matrix, index: int, precision: Precision, parallelism: Parallelism) -> Iterator[str]:
    parts = parallelism.tp_size // (parallelism.ep_size if matrix.count > 1 else 1)
    size = matrix.out_features if matrix.split == "columns" else matrix.in_features
    name = next(matrix.names(f"model.layers.{index}."))
    if size % parts:
        yield f"tp_size {parallelism.tp_size}: {name} has {size} {matrix.split}, no multiple of {parts}"
        return
    rule = precision.rule(name, matrix.role)
    if parts > 1 and rule.floats is not None and rule.scheme == "fp8" and rule.floats.granularity == "block":
        if size // parts % FP8_BLOCK:
            yield f"tp_size {parallelism.tp_size}: a rank's {size // parts} of {name} cut blocks of {FP8_BLOCK}"
    elif parts > 1 and matrix.split == "rows":
        yield from _group_obstacles(name, size // parts, precision, matrix, parallelism)


def _group_obstacles(
    name: str, size: int, precision: Precision, matrix: Matrix, parallelism: Parallelism
) -> Iterator[str]:
    part = local_matrix(matrix, parallelism)
    try:
        stored_bytes(name, part.out_features, part.in_features, precision.rule(name, matrix.role), precision)
    except QuantizeError as error:
        reason = str(error).partition("; ")[0]
        yield f"tp_size {parallelism.tp_size}: a rank's {size} inputs are cut within a group ({reason})"
