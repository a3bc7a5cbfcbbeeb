"""INT4 values packed along the output axis, as ModelOpt and TensorRT-LLM store them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_rows(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unsigned values 0..15 whose zero is 8 [out, in] to bytes [out / 2, in].

    The low nibble is the even row; nibbles are two's complement, so 8 more modulo 16 than the unsigned value.
    """
    signed = values ^ np.uint8(8)
    return signed[0::2] | (signed[1::2] << np.uint8(4))
