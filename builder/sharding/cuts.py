"""Which part of a weight a rank holds: the split of Megatron-LM (arXiv 1909.08053), and experts spread over ranks.

Queries, keys, values, gate and up are split by rows (output features), the linears that read their result by columns
(input features), so that one sum over the ranks after each pair is all they exchange. Embedding and head are split by
rows, which are tokens. Norms, routers and the biases that follow a sum are whole on each rank.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from builder.model_spec import ModelSpec
from builder.parallel import Rank

Axis = Literal["rows", "columns"]

_BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj", "w2"})
_KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})


class Cut(NamedTuple):
    """``begin:end`` of the rows or columns of a matrix [out, in]; of a vector, of its rows."""

    axis: Axis
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (self.size, *whole[1:]) if self.axis == "rows" else (whole[0], self.size)


def split_axis(name: str) -> Axis | None:
    """Along which axis the weight or bias ``name`` is split; None: whole on each rank."""
    module, _, part = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in _BY_ROWS:
        return "rows"
    return "columns" if last in _BY_COLUMNS and part == "weight" else None


def cut_of(name: str, shape: tuple[int, ...], spec: ModelSpec, rank: Rank) -> Cut | None:
    """The part that ``rank`` holds of the weight ``name`` of ``shape``; None: all of it. ``spec`` is of the model."""
    axis = split_axis(name)
    if axis is None:
        return None
    index, count = share_of(name, spec, rank)
    if count == 1:
        return None
    size = shape[0 if axis == "rows" else 1] // count
    return Cut(axis, index * size, (index + 1) * size)


def share_of(name: str, spec: ModelSpec, rank: Rank) -> tuple[int, int]:
    """Which share of how many equal ones of a split weight is the rank's."""
    tp_rank, tp_size = rank.tp_rank, rank.parallelism.tp_size
    if name.rsplit(".", 2)[-2] in _KEYS_AND_VALUES:
        # More ranks than heads: neighbours, whose queries share a head, have the same one.
        shares = min(tp_size, spec.num_kv_heads)
        return tp_rank * shares // tp_size, shares
    if ".experts." in name:
        return rank.moe_tp_rank, rank.parallelism.moe_tp_size
    return tp_rank, tp_size
