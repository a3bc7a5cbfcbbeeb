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
_ROW_SPLIT = ("o_proj", "down_proj", "w2")  # cut along the input; every other linear along the output
_NVFP4_ROWS, _NVFP4_COLUMNS = 128, 64  # the loader interleaves block scales in tiles of these many weights


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
        if is_row_split(linear.module):
            return slice(0, linear.out_features), _share(linear.in_features, self.tp_size, tp_rank)
        if linear.module in ("self_attn.k_proj", "self_attn.v_proj") and shape.num_kv_heads < self.tp_size:
            head = tp_rank * shape.num_kv_heads // self.tp_size
            return slice(head * shape.head_dim, (head + 1) * shape.head_dim), slice(0, linear.in_features)
        return _share(linear.out_features, self.tp_size, tp_rank), slice(0, linear.in_features)


def is_row_split(module: str) -> bool:
    """Whether ranks share the inputs of a linear, an expert's as well, and add up their outputs."""
    return module.rpartition(".")[2] in _ROW_SPLIT


def _share(size: int, parts: int, index: int) -> slice:
    return slice(size // parts * index, size // parts * (index + 1))


def problems_of(shape: ModelShape, mapping: Mapping, int4_group: int | None, *, has_nvfp4: bool = False) -> list[str]:
    """Why the model cannot be cut like this; empty when it can. ``int4_group``: of INT4 weights, else None."""
    tp, pp = mapping.tp_size, mapping.pp_size
    problems = []
    if pp > shape.num_layers:
        problems.append(f"{shape.num_layers} layers cannot fill {pp} pipeline stages")
    if shape.num_heads % tp:
        problems.append(f"{shape.num_heads} attention heads do not divide over tp {tp}")
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        problems.append(f"{shape.num_kv_heads} key-value heads neither divide over tp {tp} nor repeat to it")
    problems += [f"{name} {size} does not divide over tp {tp}" for name, size in _mlp_sizes(shape).items() if size % tp]
    if not problems and int4_group is not None:
        problems += _int4_problems(shape, tp, int4_group)
    if not problems and has_nvfp4:
        problems += _nvfp4_problems(shape, tp)
    return problems


def _mlp_sizes(shape: ModelShape) -> dict[str, int]:
    """Widths of the MLPs that the model has, by the config's key."""
    mixture = shape.mixture
    sizes = {} if mixture is not None and all(mixture.sparse_layers) else {"intermediate_size": shape.intermediate_size}
    if mixture is not None:
        sizes["intermediate_size" if shape.model_type == "mixtral" else "moe_intermediate_size"] = (
            mixture.intermediate_size
        )
    return sizes


def _attention_sizes(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Inputs of the output projection, and outputs of q, k and v together, over all ranks."""
    width = shape.num_heads * shape.head_dim
    return width, width + 2 * max(shape.num_kv_heads, tp) * shape.head_dim


def _int4_problems(shape: ModelShape, tp: int, group: int) -> list[str]:
    multiple = max(group, _INT4_MULTIPLE) * tp
    attention, qkv = _attention_sizes(shape, tp)
    sizes = {
        "hidden_size": shape.hidden_size,
        "the attention's width": attention,
        "the width of q, k and v together": qkv,
        **_mlp_sizes(shape),
    }
    return [
        f"{name} is {size}, INT4 in groups of {group} at tp {tp} needs a multiple of {multiple}"
        for name, size in sizes.items()
        if size % multiple
    ]


def _nvfp4_problems(shape: ModelShape, tp: int) -> list[str]:
    attention, qkv = _attention_sizes(shape, tp)
    wanted = {
        "hidden_size": (shape.hidden_size, _NVFP4_ROWS),
        "the attention's width": (attention, _NVFP4_COLUMNS * tp),
        "the width of q, k and v together": (qkv, _NVFP4_ROWS * tp),
        **{name: (size, _NVFP4_ROWS * tp) for name, size in _mlp_sizes(shape).items()},
    }
    return [
        f"{name} is {size}, NVFP4 at tp {tp} needs a multiple of {multiple}"
        for name, (size, multiple) in wanted.items()
        if size % multiple
    ]


def legal_pairs(shape: ModelShape) -> str:
    """The (tp, group) pairs that work for INT4, for an error message."""
    pairs = [
        f"({tp}, {group})" for tp in TP_SIZES for group in INT4_GROUPS if not problems_of(shape, Mapping(tp), group)
    ]
    return ", ".join(pairs) or "none"


def legal_tp_sizes(shape: ModelShape, *, has_nvfp4: bool = False) -> str:
    """The tensor-parallel sizes that work without INT4, for an error message."""
    found = [str(tp) for tp in TP_SIZES if not problems_of(shape, Mapping(tp), None, has_nvfp4=has_nvfp4)]
    return ", ".join(found) or "none"


def legal_advice(shape: ModelShape, int4_group: int | None, *, has_nvfp4: bool = False) -> str:
    """What to choose instead, for an error message."""
    if int4_group is not None:
        return f"legal (tp, group) pairs: {legal_pairs(shape)}"
    return f"legal tp: {legal_tp_sizes(shape, has_nvfp4=has_nvfp4)}; pp up to {shape.num_layers}"
