"""Integers in groups of input columns: W = (q - z) * s, whichever way q, z and s are packed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.foreign.bits import UInt8
from quantize.foreign.packed_weight import Float32, Form, PackedWeight
from quantize.foreign.parts import Part
from quantize.packing import pack_uint4
from quantize.weight_rule import GROUP_SIZES

INT4_LARGEST = 15
_CHUNK_ROWS = 1024  # of scales, whose rows the layouts may have to gather from columns
_FLOAT16_TINY = np.finfo(np.float16).tiny


class IntegerWeight(PackedWeight):
    """q is unsigned, 0 .. 2**bits - 1. ``group_index`` [in]: the group of each column, None where it is the column
    divided by the group's size. Without zero points z is the middle.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        parts: Sequence[Part | None],
        *,
        bits: int,
        group_size: int,
        has_zeros: bool,
        group_index: npt.NDArray[np.int32] | None = None,
        pre_quant_scale: Part | None = None,
    ) -> None:
        super().__init__(shape, parts, pre_quant_scale)
        self.bits = bits
        self.group_size = group_size
        self.has_zeros = has_zeros
        self.group_index = group_index

    @abstractmethod
    def unsigned(self, begin: int, end: int) -> UInt8:
        """q [end - begin, in]"""

    @abstractmethod
    def group_scales(self, begin: int, end: int) -> npt.NDArray[Any]:
        """s [end - begin, groups], in the stored type."""

    @abstractmethod
    def group_zeros(self, begin: int, end: int) -> UInt8:
        """z [end - begin, groups]; asked for only if ``has_zeros``."""

    @property
    def kind(self) -> str:
        per_channel = self.group_size >= self.shape[1]
        return f"int{self.bits}" + (" per channel" if per_channel else f" g{self.group_size}")

    @cached_property
    def form(self) -> Form | None:
        if self.bits == 8 and self.group_size >= self.shape[1] and self._is_symmetric:
            return Form("int8")
        if self.bits == 4 and self._has_neutral_groups:
            return Form("int4", self.group_size, self._is_symmetric)
        return None

    @property
    def _has_neutral_groups(self) -> bool:
        columns = self.shape[1]
        if self.group_size == columns:
            return columns % 2 == 0
        return self.group_size in GROUP_SIZES and columns % self.group_size == 0

    def obstacle(self) -> str | None:
        if self.group_index is not None:
            return "columns of a group are not neighbours (act_order)"
        if self.bits == 4 and self.has_zeros and (self._in_chunks(self.group_zeros) > INT4_LARGEST).any():
            return "some zero points are none of 0 .. 15"
        return super().obstacle()

    def values(self, begin: int, end: int) -> npt.NDArray[Any]:
        unsigned = self.unsigned(begin, end)
        return pack_uint4(unsigned) if self.bits == 4 else (unsigned ^ np.uint8(0x80)).view(np.int8)

    def scales(self) -> list[npt.NDArray[Any]]:
        scales = self._in_chunks(self.group_scales).astype(np.float32)
        if self.bits == 8:
            return [scales]
        stored = [as_float16(scales)]
        return stored if self._is_symmetric else [*stored, self._in_chunks(self.group_zeros)]

    def stored_rows(self, begin: int, end: int) -> Float32:
        rows = self.unsigned(begin, end).astype(np.float32)
        rows -= self._spread(self.group_zeros(begin, end)) if self.has_zeros else np.float32(self._middle)
        rows *= self._spread(self.group_scales(begin, end))
        return rows

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    @cached_property
    def _is_symmetric(self) -> bool:
        """GPTQ files hold zero points even where all are the middle."""
        return not self.has_zeros or bool((self._in_chunks(self.group_zeros) == self._middle).all())

    def _in_chunks(self, read: Any) -> npt.NDArray[Any]:
        begins = range(0, self.shape[0], _CHUNK_ROWS)
        chunks = [read(begin, min(begin + _CHUNK_ROWS, self.shape[0])) for begin in begins]
        return np.concatenate([np.ascontiguousarray(chunk) for chunk in chunks])

    def _spread(self, grouped: npt.NDArray[Any]) -> Float32:
        """[n, groups] to [n, in]"""
        values = grouped.astype(np.float32)
        if self.group_index is not None:
            return np.asarray(values[:, self.group_index])
        return np.repeat(values, self.group_size, axis=1)[:, : self.shape[1]] if values.shape[1] > 1 else values


def as_float16(scales: Float32) -> npt.NDArray[Any]:
    """The same in float16 where not a digit is lost, as the neutral format prefers it."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    is_exact = (halves.astype(np.float32) == scales) & (np.abs(scales) >= _FLOAT16_TINY)
    return halves if is_exact.all() else scales
