"""E8M0, the scale of the microscaling formats: a power of two as its exponent + 127 (OCP MX 1.0, section 5.4.1).

255 is NaN. Scales that Plansmith writes are 2**-126 .. 2**126: they and their reciprocals are normal float32 numbers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

E8M0_NAN = 255
_BIAS = 127
_LARGEST_EXPONENT = 126


def exponents_of(largest: npt.NDArray[np.float32], element_max: float, *, ceil: bool) -> npt.NDArray[np.int32]:
    """Exponents of the scales of blocks whose largest magnitudes are given; 0 for a block of zeros.

    ``ceil``: the smallest power of two that clips nothing. Otherwise the specification's (section 6.3): the octave of
    the largest magnitude is that of ``element_max``, the largest of the element type, and what exceeds it is clipped.
    """
    mantissas, exponents = np.frexp(largest)
    element_mantissa, element_exponent = math.frexp(element_max)
    exponents = exponents - np.int32(element_exponent)
    if ceil:
        exponents += mantissas > element_mantissa
    exponents = np.clip(exponents, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return np.where(largest == 0, np.int32(0), exponents).astype(np.int32)


def power_of_two(exponents: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Exact, for exponents -126 .. 127."""
    return ((exponents + np.int32(_BIAS)) << 23).view(np.float32)


def encode_e8m0(exponents: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    return (exponents + np.int32(_BIAS)).astype(np.uint8)


def decode_e8m0(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """All 256 codes; that of 255 is NaN."""
    return _VALUES[codes]


_VALUES = np.array([*(math.ldexp(1.0, code - _BIAS) for code in range(E8M0_NAN)), math.nan], np.float32)
