"""Two unsigned 4-bit values in a byte; the low nibble is the even column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_uint4(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Values 0..15 [..., columns] to bytes [..., columns / 2]."""
    return values[..., 0::2] | (values[..., 1::2] << np.uint8(4))


def unpack_uint4(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes [..., columns / 2] to values 0..15 [..., columns]."""
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, 0x0F, out=values[..., 0::2])
    np.right_shift(packed, 4, out=values[..., 1::2])
    return values
