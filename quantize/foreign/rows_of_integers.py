"""Integers whose rows lie one after the other: packed int32 words, or int8; of compressed-tensors and ModelOpt."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.foreign.bits import UInt8, num_words, unpack_bits
from quantize.foreign.integer_weight import IntegerWeight
from quantize.foreign.parts import Part


class RowsOfIntegers(IntegerWeight):
    """``stored`` int32 words [out, n] of unsigned values, or int8 [out, in]; ``stored_scales`` of any shape that has a
    scale per group, row or tensor; ``stored_zeros`` int32 words packed along the outputs [n, groups], or int8.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        stored: Part,
        stored_scales: Part,
        stored_zeros: Part | None = None,
        *,
        bits: int,
        group_size: int,
        others: tuple[Part | None, ...] = (),
        group_index: npt.NDArray[np.int32] | None = None,
        pre_quant_scale: Part | None = None,
    ) -> None:
        super().__init__(
            shape,
            (stored, stored_scales, stored_zeros, *others),
            bits=bits,
            group_size=group_size,
            has_zeros=stored_zeros is not None,
            group_index=group_index,
            pre_quant_scale=pre_quant_scale,
        )
        self._stored = stored
        self._scales = stored_scales
        self._zeros = stored_zeros

    def unsigned(self, begin: int, end: int) -> UInt8:
        rows = self._stored.load()[begin:end]
        return self._from_signed(rows) if rows.dtype == np.int8 else unpack_bits(rows, self.bits, self.shape[1])

    def group_scales(self, begin: int, end: int) -> npt.NDArray[Any]:
        scales = self._scales.load()
        if scales.size == 1:
            return np.broadcast_to(scales.reshape(1, 1), (end - begin, 1))
        return scales.reshape(self.shape[0], -1)[begin:end]

    def group_zeros(self, begin: int, end: int) -> UInt8:
        if self._zeros is None:
            return np.empty((0, 0), np.uint8)
        zeros = self._zeros.load()
        if zeros.dtype == np.int8:
            rows = np.broadcast_to(zeros.reshape(-1, 1), (self.shape[0], 1)) if zeros.size == 1 else zeros
            return self._from_signed(rows.reshape(self.shape[0], -1)[begin:end])
        first = begin // 32 * 32  # 32 outputs fill whole words, whatever the number of bits
        words = zeros[num_words(first, self.bits) : num_words(end, self.bits)].T
        return unpack_bits(words, self.bits, end - first)[:, begin - first :].T

    def _from_signed(self, values: npt.NDArray[Any]) -> UInt8:
        """Two's complement to unsigned; what lies outside the bits of the format wraps around within int8's range."""
        return (values.view(np.uint8) + np.uint8(1 << (self.bits - 1))).astype(np.uint8)
