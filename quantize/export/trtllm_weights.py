"""The tensors of one rank of a unified checkpoint, cut from the source when each is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.export.casting import cast, required_scales
from quantize.export.int4_rows import pack_rows
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import RankLayout, RankTensor
from quantize.export.writing import PlannedTensors
from quantize.packing import unpack_uint4
from quantize.parallel import ROW_SPLIT

Array = npt.NDArray[Any]


def rank_plan(source: ExportSource, layout: RankLayout, rank: int) -> Iterator[PlannedTensors]:
    """Every tensor of rankN.safetensors."""
    cutter = _Cutter(source, layout, rank % layout.mapping.tp_size)
    for tensor in layout.tensors(rank):
        yield _planned(cutter, tensor)


def _planned(cutter: _Cutter, tensor: RankTensor) -> PlannedTensors:
    return PlannedTensors((tensor.spec,), lambda: [cutter.build(tensor)])


class _Cutter:
    """Builds what a tensor-parallel rank holds of each tensor."""

    def __init__(self, source: ExportSource, layout: RankLayout, tp_rank: int) -> None:
        self._source = source
        self._layout = layout
        self._tp_rank = tp_rank

    def build(self, tensor: RankTensor) -> Array:
        if tensor.part == "whole":
            return self._source.floats(tensor.sources[0])
        if tensor.part == "head":
            return self._head(tensor)
        if tensor.part == "bias":
            return self._bias(tensor)
        if tensor.part == "scale":
            return self._scales(tensor)
        parts = [self._weight(name, *cut) for name, cut in self._cuts(tensor)]
        joined = np.concatenate(parts)
        return pack_rows(joined).view(np.int8) if self._layout.scheme.name == "int4" else joined

    def _cuts(self, tensor: RankTensor) -> Iterator[tuple[str, tuple[slice, slice]]]:
        for name, linear in zip(tensor.sources, tensor.members, strict=True):
            yield name, self._layout.mapping.slices(linear, self._layout.shape, self._tp_rank)

    def _weight(self, name: str, rows: slice, columns: slice) -> Array:
        """int4: unsigned values, one per byte; else as stored."""
        weight = self._source.weight(name)
        if weight.scheme == "int4":
            # A cut along the inputs falls between groups, so between bytes.
            return unpack_uint4(weight.values[rows, columns.start // 2 : columns.stop // 2])
        values = weight.values[rows, columns]
        return cast(name, values, self._layout.dtype) if weight.scheme == "none" else values

    def _scales(self, tensor: RankTensor) -> Array:
        group = self._layout.scheme.group_size
        parts = []
        for name, (rows, columns) in self._cuts(tensor):
            scales = required_scales(name, self._source.weight(name))[rows]
            if group is not None:
                scales = scales[:, columns.start // group : columns.stop // group]
            parts.append(scales.astype(np.float32))
        return np.concatenate(parts).reshape(tensor.spec.shape)

    def _bias(self, tensor: RankTensor) -> Array:
        parts = []
        for name, (rows, _) in self._cuts(tensor):
            bias = self._source.floats(name)
            # Every rank of a row-split layer has the whole bias; the run-time adds it once.
            parts.append(bias if tensor.members[0].module in ROW_SPLIT else bias[rows])
        return np.concatenate(parts)

    def _head(self, tensor: RankTensor) -> Array:
        """Rows of the padded vocabulary; the padding is zeros."""
        num_rows = tensor.spec.shape[0]
        head = self._source.floats(tensor.sources[0])[self._tp_rank * num_rows : (self._tp_rank + 1) * num_rows]
        return np.pad(head, ((0, num_rows - len(head)), (0, 0))) if len(head) < num_rows else head
