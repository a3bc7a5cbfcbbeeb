"""Integers of one to eight bits, packed without gaps, the first in the lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.packing import unpack_uint4

UInt8 = npt.NDArray[np.uint8]


def unpack_bits(words: npt.NDArray[Any], bits: int, count: int) -> UInt8:
    """Little-endian integers [rows, n] to the first ``count`` values of each row: [rows, count]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    if bits == 4:
        return unpack_uint4(packed)[:, :count]
    single = np.unpackbits(packed, axis=1, count=count * bits, bitorder="little").reshape(len(packed), count, bits)
    return np.packbits(single, axis=2, bitorder="little")[:, :, 0]


def num_words(count: int, bits: int) -> int:
    """How many 32-bit words ``count`` values take."""
    return -(-count * bits // 32)
