"""The tensors of one rank of a unified checkpoint, cut from the source when each is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.export.casting import cast
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import RankLayout, RankTensor
from quantize.export.trtllm_parts import PartCutter
from quantize.export.trtllm_scales import ModuleScales
from quantize.export.writing import PlannedTensors
from quantize.parallel import is_row_split

Array = npt.NDArray[Any]
_FLOAT32 = np.dtype(np.float32)


def rank_plan(source: ExportSource, layout: RankLayout, scales: ModuleScales, rank: int) -> Iterator[PlannedTensors]:
    """Every tensor of rankN.safetensors. ``scales`` may be shared by the ranks."""
    cutter = _Cutter(source, layout, scales, rank % layout.mapping.tp_size)
    for tensor in layout.tensors(rank):
        yield _planned(cutter, tensor)


def _planned(cutter: _Cutter, tensor: RankTensor) -> PlannedTensors:
    return PlannedTensors((tensor.spec,), lambda: [cutter.build(tensor)])


class _Cutter:
    """Builds what a tensor-parallel rank holds of each tensor."""

    def __init__(self, source: ExportSource, layout: RankLayout, scales: ModuleScales, tp_rank: int) -> None:
        self._source = source
        self._layout = layout
        self._scales = scales
        self._tp_rank = tp_rank
        self._parts = PartCutter(source, layout, scales, tp_rank)

    def build(self, tensor: RankTensor) -> Array:
        if tensor.part == "whole":
            return self._source.floats(tensor.sources[0])
        if tensor.part == "head":
            return self._head(tensor)
        if tensor.part == "router":  # routing decides which experts compute: the loader wants its full precision
            return cast(tensor.sources[0], self._source.weight(tensor.sources[0]).values, _FLOAT32)
        if tensor.part == "bias":
            return self._bias(tensor)
        if tensor.part == "kv":
            return self._scales.of_kv_cache(tensor.sources)
        if (
            tensor.part == "one"
        ):  # static scales of the plugins' inputs, which a scale for each token takes the place of
            return np.ones(tensor.spec.shape, tensor.spec.dtype)
        return self._parts.build(tensor)

    def _bias(self, tensor: RankTensor) -> Array:
        parts = []
        members = tensor.module.members if tensor.module is not None else ()
        for name, linear in zip(tensor.sources, members, strict=True):
            rows, _ = self._layout.mapping.slices(linear, self._layout.shape, self._tp_rank)
            bias = self._source.floats(name)
            # Every rank of a row-split layer has the whole bias; the run-time adds it once.
            parts.append(bias if is_row_split(linear.module) else bias[rows])
        return np.concatenate(parts)

    def _head(self, tensor: RankTensor) -> Array:
        """Rows of the padded vocabulary; the padding is zeros."""
        num_rows = tensor.spec.shape[0]
        head = self._source.floats(tensor.sources[0])[self._tp_rank * num_rows : (self._tp_rank + 1) * num_rows]
        return np.pad(head, ((0, num_rows - len(head)), (0, 0))) if len(head) < num_rows else head
