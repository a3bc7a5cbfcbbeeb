"""The numbers: packing, rounding and scales, against plain formulas written independently."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantize.float8 import cast_e4m3
from quantize.packing import pack_uint4, unpack_uint4
from quantize.quantized_tensor import QuantizedTensor
from quantize.rounding import RoundedRows, round_fp8, round_int4, round_int8

finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)
ordinary = st.floats(-8, 8, width=32)


def matrices(columns: int, elements: st.SearchStrategy[float] = finite) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(columns)), elements=elements)


def as_tensor(
    rounded: RoundedRows, shape: tuple[int, ...], scheme: str, group_size: int | None = None
) -> QuantizedTensor:
    return QuantizedTensor(scheme, shape, rounded.values, rounded.scales, rounded.zero_points, group_size)


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.sampled_from([2, 32, 64])), elements=st.integers(0, 15)))
def test_nibbles_come_back(values: np.ndarray) -> None:
    packed = pack_uint4(values)
    np.testing.assert_array_equal(unpack_uint4(packed), values)
    assert packed[0, 0] & 0x0F == values[0, 0], "the low nibble is the even column"


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.uint32, 256, elements=st.integers(0, 2**32 - 1)).map(lambda bits: bits.view(np.float32)),
)
def test_e4m3_is_the_nearest_ties_to_even(values: np.ndarray) -> None:
    values = values[np.isfinite(values)]
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(cast_e4m3(values).view(np.uint8), expected.view(np.uint8))


def test_e4m3_at_every_value_and_midpoint() -> None:
    """Where rounding can go wrong: codes, the midpoints between them, and one float32 step to either side."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    midpoints = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, midpoints, [448, 464, 480, 1e30]]).astype(np.float32)
    near = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])
    near = np.concatenate([near, -near])
    expected = np.clip(near, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(cast_e4m3(near).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 192])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_int4_is_within_half_a_step(symmetric: bool, group_size: int, data: st.DataObject) -> None:
    rows = data.draw(matrices(group_size * 2))
    rounded = round_int4(rows, group_size, symmetric=symmetric, scale="absmax", scale_dtype=np.float32)
    assert rounded is not None
    tensor = as_tensor(rounded, rows.shape, "int4", group_size)
    steps = np.repeat(tensor.scales, group_size, axis=1).astype(np.float64)
    error = np.abs(tensor.dequantize().astype(np.float64) - rows)
    assert np.isfinite(tensor.scales).all() and (tensor.scales > 0).all()
    assert (error <= steps * (0.5 + 1e-5)).all()


@given(rows=matrices(64, ordinary), symmetric=st.booleans())
@settings(max_examples=60, deadline=None)
def test_int4_follows_the_plain_formula(rows: np.ndarray, symmetric: bool) -> None:
    """q = clip(round(w / s) + z), with s and z of the whole range, written out group by group."""
    rounded = round_int4(rows, 32, symmetric=symmetric, scale="absmax", scale_dtype=np.float32)
    assert rounded is not None
    tensor = as_tensor(rounded, rows.shape, "int4", 32)
    values = tensor.unpacked().reshape(-1, 32)
    zeros = np.full(len(values), 8.0) if symmetric else tensor.zero_points.reshape(-1).astype(float)
    groups = zip(rows.reshape(-1, 32), values, rounded.scales.reshape(-1), zeros, strict=True)
    for group, stored, scale, zero in groups:
        low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
        expected = max(high / 7, -low / 8) if symmetric else (high - low) / 15
        if expected < 1e-30:
            continue
        assert scale == pytest.approx(expected, rel=1e-6)
        assert symmetric or abs(zero + low / expected) <= 0.5 + 1e-5  # a tie goes either way, as below
        plain = np.clip(np.rint(group / scale) + zero, 0, 15)
        # float32 and float64 may round a tie apart; nothing else may differ.
        differs = plain != stored
        assert (
            np.abs(np.abs(group / scale - np.floor(group / scale)) - 0.5)[differs] < 1e-5
        ).all() or not differs.any()


@given(rows=matrices(64, ordinary), symmetric=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_scale_search_never_does_worse(rows: np.ndarray, symmetric: bool) -> None:
    plain = round_int4(rows, 64, symmetric=symmetric, scale="absmax", scale_dtype=np.float32)
    searched = round_int4(rows, 64, symmetric=symmetric, scale="mse", scale_dtype=np.float32)
    assert plain is not None and searched is not None
    assert searched.squared_error <= plain.squared_error * (1 + 1e-4) + 1e-30


def test_int4_uses_all_sixteen_values() -> None:
    ramp = np.linspace(-8, 7, 64, dtype=np.float32)[None]
    rounded = round_int4(ramp, 64, symmetric=True, scale="absmax", scale_dtype=np.float16)
    assert rounded is not None
    assert set(unpack_uint4(rounded.values).ravel()) == set(range(16))


@given(rows=matrices(48))
@settings(max_examples=60, deadline=None)
def test_int8_and_fp8_follow_plain_formulas(rows: np.ndarray) -> None:
    for scheme, rounded in (("int8", round_int8(rows)), ("fp8", round_fp8(rows))):
        tensor = as_tensor(rounded, rows.shape, scheme)
        largest = np.abs(rows).max(axis=1, keepdims=True)
        scales = np.where(largest == 0, 1, largest / np.float32(127 if scheme == "int8" else 448))
        usable = scales > 1e-37
        np.testing.assert_array_equal(tensor.scales[usable], scales[usable].astype(np.float32))
        dequantized = tensor.dequantize()
        assert np.isfinite(dequantized).all()
        if scheme == "int8":
            assert (np.abs(dequantized - rows) <= tensor.scales * 0.50001).all()
            assert tensor.values.min() >= -127
        else:
            # 3 bits of mantissa: half of 2**-3; below the smallest normal value a fixed step of 2**-9.
            assert (np.abs(dequantized - rows) <= np.maximum(np.abs(rows) / 16, tensor.scales * 2**-10) * 1.0001).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros(symmetric: bool) -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 32:] = 0.25
    rounded = round_int4(rows, 32, symmetric=symmetric, scale="mse", scale_dtype=np.float16)
    assert rounded is not None
    tensors = [
        as_tensor(rounded, rows.shape, "int4", 32),
        as_tensor(round_int8(rows), rows.shape, "int8"),
        as_tensor(round_fp8(rows), rows.shape, "fp8"),
    ]
    for tensor in tensors:
        assert (
            tensor.scales is not None
            and np.isfinite(tensor.scales.astype(np.float32)).all()
            and (tensor.scales > 0).all()
        )
        dequantized = tensor.dequantize()
        assert (dequantized[rows == 0] == 0).all()
        np.testing.assert_allclose(dequantized, rows, rtol=1e-3)


@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_scales_outside_float16_are_noticed(magnitude: float) -> None:
    rows = np.full((1, 32), magnitude, np.float32)
    rows[0, 0] = -magnitude
    assert round_int4(rows, 32, symmetric=True, scale="absmax", scale_dtype=np.float16) is None
    wide = round_int4(rows, 32, symmetric=True, scale="absmax", scale_dtype=np.float32)
    assert wide is not None
    np.testing.assert_allclose(as_tensor(wide, rows.shape, "int4", 32).dequantize(), rows, rtol=0.1)
