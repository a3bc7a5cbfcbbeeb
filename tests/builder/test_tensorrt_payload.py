"""Floats on their way into a plan: every bfloat16 becomes the float16 that ml_dtypes makes of it, or is refused."""

import ml_dtypes
import numpy as np
import pytest

from builder.targets.tensorrt.external import stored, stored_as
from builder.targets.tensorrt.payload import deferred_cast, float_payload
from plansmith_errors import BuildError
from quantize.finite import all_finite

EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def test_every_bfloat16_that_fits_becomes_the_nearest_float16():
    fits = EVERY_BFLOAT16[np.abs(EVERY_BFLOAT16.astype(np.float32)) <= 65504]
    matrix = np.tile(fits, 5)[: fits.size * 5 // 64 * 64].reshape(-1, 64)  # more than a block of values
    payload = float_payload(matrix, "float16", "w")
    assert payload.shape == matrix.shape
    np.testing.assert_array_equal(payload.array.view(np.uint16), matrix.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [65536.0, -3e38])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_value_beyond_float16_is_refused_with_the_way_out(value, dtype):
    values = np.ones((3, 200_000), dtype)
    values[2, 199_999] = value
    with pytest.raises(BuildError, match="w has values beyond the range of float16"):
        float_payload(values, "float16", "w")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_value_that_is_not_finite_is_seen_wherever_it_is(dtype, bad):
    values = np.zeros((700, 300), dtype)
    values[0, 0] = np.finfo(dtype).max if dtype in (np.float16, np.float32) else ml_dtypes.finfo(dtype).max
    assert all_finite(values) and all_finite(values[:, ::3]) and all_finite(values[:0])
    values[431, 17] = bad  # float8_e4m3fn has no infinity: it becomes NaN
    assert not all_finite(values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_cast_that_waits_is_the_same_cast(dtype):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    now, later = float_payload(values, dtype, "w"), deferred_cast(values, dtype, "w")
    assert (later.dtype, later.shape, later.nbytes) == (now.dtype, now.shape, now.nbytes)
    np.testing.assert_array_equal(later.array, now.array)
    assert stored_as(later) == (stored(now).dtype, stored(now).shape)
    values[4, 6] = 1e6
    if dtype == "float16":
        with pytest.raises(BuildError, match="w has values beyond the range of float16"):
            later.array.sum()
