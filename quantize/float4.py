"""float32 to E2M1, the four-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats Specification 1.0, section 5.3.3).

A code is a sign (bit 3) and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounding is to nearest, ties to the even code.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.packing import unpack_uint4

Float32 = npt.NDArray[np.float32]

E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES: Float32 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_ONE_BITS = np.uint32(127 << 23)  # of float32 1.0
_EXPONENT_MASK = np.uint32(0xFF << 23)
_UNIT_SHIFT = np.uint32(22 << 23)  # times 2**22: added to a float, it leaves the float one digit after the first


def round_e2m1(magnitudes: Float32, out: Float32, scratch: npt.NDArray[np.uint32]) -> None:
    """Round ``magnitudes`` (>= 0, any shape) to the nearest value of E2M1, saturating at 6; ``out`` is another array.

    ``scratch`` has the same shape. Seven passes without a branch: the search for scales lives on it.
    """
    np.minimum(magnitudes, np.float32(E2M1_MAX), out=out)
    # The octave of each value, the lowest one reaching down to zero, as the float that makes the hardware round there.
    np.maximum(out.view(np.uint32), _ONE_BITS, out=scratch)
    np.bitwise_and(scratch, _EXPONENT_MASK, out=scratch)
    np.add(scratch, _UNIT_SHIFT, out=scratch)
    np.add(out, scratch.view(np.float32), out=out)
    np.subtract(out, scratch.view(np.float32), out=out)


def cast_e2m1(values: Float32) -> tuple[npt.NDArray[np.uint8], Float32]:
    """Codes 0..15 of finite values, one per byte, and the magnitudes that they stand for."""
    rounded = np.empty_like(values)
    round_e2m1(np.abs(values), rounded, np.empty(values.shape, np.uint32))
    halves = (rounded + rounded).astype(np.uint8)  # 0 1 2 3 4 6 8 12
    codes = halves - (halves > 4).view(np.uint8) - (halves > 6).view(np.uint8) - 3 * (halves > 8).view(np.uint8)
    codes |= (values.view(np.uint32) >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    return codes, rounded


def decode_packed_e2m1(packed: npt.NDArray[np.uint8]) -> Float32:
    """Bytes [..., columns / 2], the low nibble being the even column, to float32 [..., columns]."""
    return E2M1_VALUES[unpack_uint4(packed)]
