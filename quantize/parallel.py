"""How a decoder is cut over tensor-parallel and pipeline-parallel ranks, and which cuts are legal.

The rules are those of TensorRT-LLM's unified checkpoint: rank = pp_rank * tp + tp_rank, whole heads per rank, key-value
heads repeated when there are fewer of them than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantize.model_shape import Linear, ModelShape

TP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
INT4_GROUPS = (64, 128)  # of TensorRT-LLM's kernels
_INT4_MULTIPLE = 64  # below it the run-time pads a layer, and then no longer accepts the stored shapes
ROW_SPLIT = ("self_attn.o_proj", "mlp.down_proj")  # cut along the input; every other linear along the output


@dataclass(frozen=True)
class Mapping:
    """A cut of the model."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def layers_of(self, pp_rank: int, num_layers: int) -> range:
        """The decoder layers of a pipeline stage; the first stages get one more when it does not divide."""
        share, rest = divmod(num_layers, self.pp_size)
        begin = pp_rank * share + min(pp_rank, rest)
        return range(begin, begin + share + (pp_rank < rest))

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the output head: the vocabulary filled up to a multiple of the ranks."""
        return -(-vocab_size // self.tp_size) * self.tp_size

    def slices(self, linear: Linear, shape: ModelShape, tp_rank: int) -> tuple[slice, slice]:
        """The rows (outputs) and columns (inputs) of ``linear`` that a rank holds."""
        if linear.module in ROW_SPLIT:
            return slice(0, linear.out_features), _share(linear.in_features, self.tp_size, tp_rank)
        if linear.module in ("self_attn.k_proj", "self_attn.v_proj") and shape.num_kv_heads < self.tp_size:
            head = tp_rank * shape.num_kv_heads // self.tp_size
            return slice(head * shape.head_dim, (head + 1) * shape.head_dim), slice(0, linear.in_features)
        return _share(linear.out_features, self.tp_size, tp_rank), slice(0, linear.in_features)


def _share(size: int, parts: int, index: int) -> slice:
    return slice(size // parts * index, size // parts * (index + 1))


def problems_of(shape: ModelShape, mapping: Mapping, int4_group: int | None) -> list[str]:
    """Why the model cannot be cut like this; empty when it can. ``int4_group``: of INT4 weights, else None."""
    tp, pp = mapping.tp_size, mapping.pp_size
    problems = []
    if pp > shape.num_layers:
        problems.append(f"{shape.num_layers} layers cannot fill {pp} pipeline stages")
    if shape.num_heads % tp:
        problems.append(f"{shape.num_heads} attention heads do not divide over tp {tp}")
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        problems.append(f"{shape.num_kv_heads} key-value heads neither divide over tp {tp} nor repeat to it")
    if shape.intermediate_size % tp:
        problems.append(f"intermediate_size {shape.intermediate_size} does not divide over tp {tp}")
    if not problems and int4_group is not None:
        problems += _int4_problems(shape, tp, int4_group)
    return problems


def _int4_problems(shape: ModelShape, tp: int, group: int) -> list[str]:
    multiple = max(group, _INT4_MULTIPLE) * tp
    kv_rows = 2 * max(shape.num_kv_heads, tp) * shape.head_dim
    sizes = {
        "hidden_size": shape.hidden_size,
        "the attention's width": shape.num_heads * shape.head_dim,
        "the width of q, k and v together": shape.num_heads * shape.head_dim + kv_rows,
        "intermediate_size": shape.intermediate_size,
    }
    return [
        f"{name} is {size}, INT4 in groups of {group} at tp {tp} needs a multiple of {multiple}"
        for name, size in sizes.items()
        if size % multiple
    ]


def legal_pairs(shape: ModelShape) -> str:
    """The (tp, group) pairs that work for INT4, for an error message."""
    pairs = [
        f"({tp}, {group})" for tp in TP_SIZES for group in INT4_GROUPS if not problems_of(shape, Mapping(tp), group)
    ]
    return ", ".join(pairs) or "none"


def legal_tp_sizes(shape: ModelShape) -> str:
    """The tensor-parallel sizes that work without INT4, for an error message."""
    return ", ".join(str(tp) for tp in TP_SIZES if not problems_of(shape, Mapping(tp), None))


def legal_advice(shape: ModelShape, int4_group: int | None) -> str:
    """What to choose instead, for an error message."""
    if int4_group is not None:
        return f"legal (tp, group) pairs: {legal_pairs(shape)}"
    return f"legal tp: {legal_tp_sizes(shape)}; pp up to {shape.num_layers}"
