"""Parts of fused projections that another tool packed as one matrix: rows of it, with the scales of these rows."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.foreign.checkpoint import ForeignCheckpoint
from quantize.foreign.packed_weight import Float32, Form, PackedWeight
from quantize.split_projections import SplitCheckpoint, split_projections
from quantize.weight_rule import FP8_BLOCK


class PackedRows(PackedWeight):
    """``rows`` rows of ``whole`` from ``first`` on."""

    def __init__(self, whole: PackedWeight, first: int, rows: int) -> None:
        super().__init__((rows, whole.shape[1]), whole.parts, None)
        self.pre_quant_scale = whole.pre_quant_scale  # one of the parts already
        self._whole, self._first = whole, first

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes * self.shape[0] // self._whole.shape[0]

    @property
    def kind(self) -> str:
        return self._whole.kind

    @property
    def form(self) -> Form | None:
        return self._whole.form

    def values(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._whole.values(self._first + begin, self._first + end)

    def scales(self) -> list[npt.NDArray[Any]]:
        return [self._own(array) for array in self._whole.scales()]

    def stored_rows(self, begin: int, end: int) -> Float32:
        return self._whole.stored_rows(self._first + begin, self._first + end)

    def obstacle(self) -> str | None:
        form, end = self._whole.form, self._first + self.shape[0]
        cuts = [row for row in (self._first, end) if row != self._whole.shape[0] and row % FP8_BLOCK]
        if form is not None and form.granularity == "block" and cuts:
            return f"parts of a fused matrix cut its blocks of {FP8_BLOCK} rows"
        return self._whole.obstacle()

    def _own(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of scales of rows, groups or blocks; those of the whole matrix are every part's."""
        if array.ndim == 0:
            return array
        step = 1 if array.shape[0] == self._whole.shape[0] else FP8_BLOCK
        return array[self._first // step : -(-(self._first + self.shape[0]) // step)]


class SplitForeignCheckpoint(SplitCheckpoint):
    """As SplitCheckpoint, where a part of a packed matrix is packed too."""

    def __init__(self, source: ForeignCheckpoint) -> None:
        super().__init__(source)
        self._packed_source = source

    @property
    def largest_int4_group(self) -> int | None:
        return self._packed_source.largest_int4_group

    def packed(self, name: str) -> PackedWeight | None:
        """See ForeignCheckpoint."""
        if name not in self:
            return None
        stored, first, rows = self._place(name)
        weight = self._packed_source.packed(stored)
        return weight if weight is None or stored == name else PackedRows(weight, first, rows)

    def info(self, name: str) -> TensorInfo:
        weight = self.packed(name)
        return super().info(name) if weight is None else TensorInfo(name, weight.kind, weight.shape, weight.nbytes)


PackedCheckpoint = ForeignCheckpoint | SplitForeignCheckpoint


def split_packed(source: ForeignCheckpoint) -> Checkpoint:
    """``source`` itself when nothing in it is fused. Raises CheckpointError for rows that config.json does not say."""
    return SplitForeignCheckpoint(source) if isinstance(split_projections(source), SplitCheckpoint) else source
