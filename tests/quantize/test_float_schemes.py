"""nvfp4, mxfp4, mxfp8 and fp8 in blocks: the values, their errors, and the scales, against formulas written anew."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantize.block_rounding import nvfp4_tensor_scale, round_mxfp4, round_mxfp8, round_nvfp4
from quantize.packing import unpack_uint4
from quantize.rounding import RoundedRows, round_fp8_band, round_int4

rows_of = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(64)), elements=st.floats(-8, 8, width=32))
extreme_rows = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.just(64)), elements=st.floats(-(2.0**120), 2.0**120, width=32)
)


def e2m1(packed: np.ndarray) -> np.ndarray:
    return unpack_uint4(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def e8m0(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def dequantize(scheme: str, rounded: RoundedRows, tensor_scale: np.float32 | None = None) -> np.ndarray:
    """By ml_dtypes and float64; nothing of the package under test but the order of nibbles."""
    assert rounded.scales is not None
    if scheme == "int4":
        values, scales = unpack_uint4(rounded.values).astype(np.float64) - 8, rounded.scales.astype(np.float64)
    elif scheme == "nvfp4":
        values, scales = e2m1(rounded.values), rounded.scales.astype(np.float64) * float(tensor_scale or 1)
    else:
        values = e2m1(rounded.values) if scheme == "mxfp4" else rounded.values.astype(np.float64)
        scales = e8m0(rounded.scales)
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)


def quantize_rows(scheme: str, rows: np.ndarray, scale: Any = None) -> np.ndarray:
    if scheme == "nvfp4":
        tensor_scale = nvfp4_tensor_scale(np.abs(rows).max())
        return dequantize(scheme, round_nvfp4(rows, tensor_scale, scale), tensor_scale)
    return dequantize(scheme, round_mxfp4(rows, scale) if scheme == "mxfp4" else round_mxfp8(rows))


@pytest.fixture(scope="module")
def gaussian() -> np.ndarray:
    return np.random.default_rng(42).standard_normal((256, 2048), np.float32)


def relative_error(rows: np.ndarray, dequantized: np.ndarray) -> float:
    return float(np.linalg.norm(rows - dequantized) / np.linalg.norm(rows))


@pytest.mark.parametrize(
    ("scheme", "scale", "least", "most"),
    [
        ("nvfp4", "absmax", 0.094, 0.096),
        ("nvfp4", "four-over-six", 0.086, 0.088),
        ("nvfp4", "mse", 0.080, 0.083),
        ("mxfp4", "ceil", 0.114, 0.119),
        ("mxfp4", "ocp", 0.113, 0.117),
        ("mxfp4", "best-of-two", 0.110, 0.112),
        ("mxfp8", None, 0.025, 0.028),
    ],
)
def test_error_on_gaussian_weights(gaussian: np.ndarray, scheme: str, scale: Any, least: float, most: float) -> None:
    assert least < relative_error(gaussian, quantize_rows(scheme, gaussian, scale)) <= most


def test_int4_search_on_gaussian_weights(gaussian: np.ndarray) -> None:
    """Groups of 128 without zero points; amax / 7, as others choose it, costs 0.117."""
    rounded = round_int4(gaussian, 128, symmetric=True, scale="mse", scale_dtype=np.float16)
    assert rounded is not None
    assert relative_error(gaussian, dequantize("int4", rounded)) <= 0.102


@settings(max_examples=60, deadline=None)
@given(rows=rows_of, scheme_and_scale=st.sampled_from([("nvfp4", "mse"), ("mxfp4", "best-of-two"), ("mxfp8", None)]))
def test_each_value_is_the_nearest_of_its_block(rows: np.ndarray, scheme_and_scale: tuple[str, Any]) -> None:
    scheme, scale = scheme_and_scale
    codes = np.arange(16 if scheme != "mxfp8" else 256, dtype=np.uint8)
    grid = codes.view(ml_dtypes.float8_e4m3fn if scheme == "mxfp8" else ml_dtypes.float4_e2m1fn).astype(np.float64)
    grid = grid[np.isfinite(grid)]
    if scheme == "nvfp4":
        tensor_scale = nvfp4_tensor_scale(np.abs(rows).max())
        rounded = round_nvfp4(rows, tensor_scale, scale)
        assert rounded.scales is not None
        scales = rounded.scales.astype(np.float64) * float(tensor_scale)
    else:
        tensor_scale = None
        rounded = round_mxfp8(rows) if scheme == "mxfp8" else round_mxfp4(rows, scale)
        assert rounded.scales is not None
        scales = e8m0(rounded.scales)
    scales = np.repeat(scales, 64 // scales.shape[1], axis=1)
    found = np.abs(dequantize(scheme, rounded, tensor_scale) - rows)
    least = np.abs(grid[:, None, None] * scales - rows).min(axis=0)
    assert (found <= least + 1e-6 * scales).all()
    assert rounded.squared_error == pytest.approx(float(np.square(found).sum()), rel=1e-3, abs=1e-9)


def test_torch_rounds_alike(gaussian: np.ndarray) -> None:
    """The scales of nvfp4's blocks and the values of mxfp8, by torch's casts to float8_e4m3fn."""
    rows = torch.from_numpy(gaussian[:16])
    tensor_scale = nvfp4_tensor_scale(np.abs(gaussian).max())
    rounded = round_nvfp4(gaussian[:16], tensor_scale, "absmax")
    assert rounded.scales is not None
    largest = rows.reshape(16, -1, 16).abs().amax(-1)
    expected = (largest / float(tensor_scale) / 6).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(rounded.scales.view(np.uint8), expected)

    rounded = round_mxfp8(gaussian[:16])
    assert rounded.scales is not None
    scales = torch.from_numpy(rounded.scales).view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
    expected = (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(rounded.values.view(np.uint8), expected)


@settings(max_examples=60, deadline=None)
@given(rows=rows_of)
def test_searches_never_do_worse_than_what_they_search(rows: np.ndarray) -> None:
    tensor_scale = nvfp4_tensor_scale(np.abs(rows).max())
    plain, two, best = (
        round_nvfp4(rows, tensor_scale, scale).squared_error for scale in ("absmax", "four-over-six", "mse")
    )
    assert two <= plain * (1 + 1e-4) + 1e-20 and best <= plain * (1 + 1e-4) + 1e-20
    ceil, ocp, best = (round_mxfp4(rows, scale).squared_error for scale in ("ceil", "ocp", "best-of-two"))
    assert best <= min(ceil, ocp) * (1 + 1e-4) + 1e-20


@settings(max_examples=60, deadline=None)
@given(rows=extreme_rows)
def test_scales_are_finite_and_never_zero(rows: np.ndarray) -> None:
    tensor_scale = nvfp4_tensor_scale(np.abs(rows).max())
    assert np.isfinite(tensor_scale) and tensor_scale > 0
    for rounded in (
        *(round_nvfp4(rows, tensor_scale, scale) for scale in ("absmax", "four-over-six", "mse")),
        *(round_mxfp4(rows, scale) for scale in ("ceil", "ocp", "best-of-two")),
        round_mxfp8(rows),
    ):
        assert rounded.scales is not None
        if rounded.scales.dtype == np.uint8:
            assert rounded.scales.min() >= 1 and rounded.scales.max() <= 254
        else:
            scales = rounded.scales.astype(np.float32)
            assert np.isfinite(scales).all() and (scales >= 2**-9).all()


def test_small_blocks_beside_large_ones_keep_the_smallest_scale() -> None:
    """A block 2**20 times smaller than the largest weight: its scale underflows e4m3, and is held at 2**-9."""
    rows = np.ones((1, 32), np.float32)
    rows[0, 16:] = 2.0**-20
    rounded = round_nvfp4(rows, nvfp4_tensor_scale(np.float32(1)), "absmax")
    assert rounded.scales is not None and rounded.scales.astype(np.float32).tolist() == [[448, 2**-9]]


def test_zeros_stay_zeros() -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[0, 32:] = 3.0
    for scheme, scale in (("nvfp4", "mse"), ("mxfp4", "best-of-two"), ("mxfp8", None)):
        np.testing.assert_allclose(quantize_rows(scheme, rows, scale), rows, rtol=1e-6)
    nothing = round_nvfp4(np.zeros((1, 16), np.float32), nvfp4_tensor_scale(np.float32(0)), "mse")
    assert nothing.scales is not None and nothing.scales.astype(np.float32).tolist() == [[1]]


normal = st.floats(-8, 8, width=32, allow_subnormal=False)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 128), st.integers(1, 300)), elements=normal))
def test_fp8_blocks_follow_the_plain_formula(rows: np.ndarray) -> None:
    """Also where 128 does not divide the matrix: the last block is the rest."""
    rounded = round_fp8_band(rows)
    assert rounded.scales is not None and rounded.scales.shape == (1, -(-rows.shape[1] // 128))
    for block, scale in enumerate(rounded.scales[0]):
        columns = slice(block * 128, (block + 1) * 128)
        largest = np.abs(rows[:, columns]).max()
        assert scale == pytest.approx(largest / 448 if largest else 1, rel=1e-6, abs=1e-37)
        expected = np.clip(rows[:, columns] / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(rounded.values[:, columns].view(np.uint8), expected.view(np.uint8))
