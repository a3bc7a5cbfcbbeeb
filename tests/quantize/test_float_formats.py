"""The codes of E2M1, e4m3 and E8M0: against every value of the formats, ml_dtypes and torch."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantize.e8m0 import decode_e8m0, encode_e8m0, exponents_of, power_of_two
from quantize.float4 import E2M1_VALUES, cast_e2m1, decode_packed_e2m1
from quantize.packing import pack_uint4

MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
any_float = hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)).map(lambda bits: bits.view(np.float32))
near_codes = hnp.arrays(np.float32, 64, elements=st.floats(-8, 8, width=32))


def nearest_e2m1(value: float) -> int:
    """By brute force: the nearest magnitude; of two equally near the one with the even code."""
    magnitude = min(abs(value), 8)  # float64 cannot tell the distances of 1e17 from 4 and from 6
    code = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - magnitude), code % 2))
    return code + (8 if math.copysign(1, value) < 0 else 0)


def test_every_code_is_itself() -> None:
    codes, magnitudes = cast_e2m1(E2M1_VALUES)
    np.testing.assert_array_equal(codes, np.arange(16))
    np.testing.assert_array_equal(magnitudes, MAGNITUDES * 2)
    np.testing.assert_array_equal(E2M1_VALUES, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn))


@settings(max_examples=60, deadline=None)
@given(st.one_of(near_codes, any_float))
def test_e2m1_is_the_nearest_ties_to_even(values: np.ndarray) -> None:
    values = values[np.isfinite(values)]
    codes, magnitudes = cast_e2m1(values)
    np.testing.assert_array_equal(codes, [nearest_e2m1(float(value)) for value in values])
    np.testing.assert_array_equal(magnitudes, np.abs(E2M1_VALUES[codes]))
    np.testing.assert_array_equal(codes, np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_e2m1_at_every_midpoint() -> None:
    """Midpoints, and one float32 step to either side of each."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    values = np.concatenate([middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(0))])
    for signed in (values, -values):
        np.testing.assert_array_equal(cast_e2m1(signed)[0], [nearest_e2m1(float(value)) for value in signed])


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 4), st.sampled_from([2, 16, 48])), elements=st.integers(0, 15)))
@settings(max_examples=40, deadline=None)
def test_packed_codes_come_back(codes: np.ndarray) -> None:
    np.testing.assert_array_equal(decode_packed_e2m1(pack_uint4(codes)), E2M1_VALUES[codes])


def test_e8m0_means_what_ml_dtypes_and_torch_say() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_e8m0(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    theirs = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(decode_e8m0(codes), theirs)


def test_e8m0_comes_back() -> None:
    exponents = np.arange(-126, 127, dtype=np.int32)
    np.testing.assert_array_equal(decode_e8m0(encode_e8m0(exponents)), power_of_two(exponents))
    np.testing.assert_array_equal(power_of_two(exponents), np.ldexp(np.float32(1), exponents))


@pytest.mark.parametrize("element_max", [6.0, 448.0])
@settings(max_examples=60, deadline=None)
@given(values=any_float)
def test_block_exponents_follow_their_definitions(element_max: float, values: np.ndarray) -> None:
    largest = np.abs(values[np.isfinite(values) & (values != 0)])
    ceil, ocp = (exponents_of(largest, element_max, ceil=ceil).tolist() for ceil in (True, False))
    for value, up, octave in zip(largest.tolist(), ceil, ocp, strict=True):
        if up > -126:
            assert element_max * 2.0**up >= value > element_max * 2.0 ** (up - 1), "the smallest that does not clip"
        if octave > -126:
            assert octave == math.floor(math.log2(value)) - math.floor(math.log2(element_max))


def test_blocks_of_zeros_have_the_scale_one() -> None:
    assert exponents_of(np.zeros(2, np.float32), 6.0, ceil=True).tolist() == [0, 0]
