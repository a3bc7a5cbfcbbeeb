"""The compiled loops of calibrated int4 give what NumPy's give, bit for bit, on any shape and on strided blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.algorithms import block_feedback, scale_search
from quantize.algorithms.grid import Grid, range_grid
from quantize.native import feedback, library

with pytest.MonkeyPatch.context() as patch:
    patch.delenv(library.SWITCH, raising=False)  # the suite may run without them, these tests need them
    LIBRARY = library.native_library.__wrapped__()
KERNELS = LIBRARY and feedback.FeedbackKernels(LIBRARY)


def both(module, run):
    """What NumPy and the kernels leave behind."""
    results = []
    for kernels in (None, KERNELS):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "native_feedback", lambda kernels=kernels: kernels)
            results.append(run())
    return results


@st.composite
def blocks(draw):
    """A part of a larger matrix [n, out], its grid of groups of four columns, and a square matrix [n, n]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, outputs = 4 * draw(st.integers(1, 8)), draw(st.integers(1, 70))
    scale = draw(st.sampled_from([1e-6, 0.05, 30.0]))
    whole = rng.normal(0, scale, (rows, outputs + 9)).astype(np.float32)
    symmetric, first = draw(st.booleans()), draw(st.integers(0, 9))
    grid = range_grid(whole, 4, symmetric=symmetric)
    part = slice(first, first + outputs)
    square = rng.normal(0, 0.3, (rows, rows)).astype(np.float32)
    groups = rng.permutation(np.repeat(np.arange(rows // 4, dtype=np.int32), 4))[:: draw(st.sampled_from([1, -1]))]
    return whole[:, part], grid.columns(part.start, part.stop), square, groups, rng


def one_group(weights, is_half):
    """The grid of all rows as one group, in float16 where that holds its scales."""
    dtype = np.dtype(np.float16 if is_half and np.abs(weights).max() > 1e-3 else np.float32)
    return range_grid(weights, len(weights), symmetric=True, dtype=dtype)


@given(blocks())
@settings(max_examples=60, deadline=None)
def test_rounding_with_feedback(block):
    weights, grid, feedback_, groups, rng = block
    shifted = weights + rng.normal(0, 0.01, weights.shape).astype(np.float32)

    def run():
        values, errors = np.empty(weights.shape, np.uint8), np.empty_like(weights)
        block_feedback.round_block(shifted.copy(), weights, feedback_, grid, groups, values, errors)
        return values.tobytes(), errors.tobytes()

    numpy, native = both(block_feedback, run)
    assert numpy == native


@given(blocks())
@settings(max_examples=60, deadline=None)
def test_coordinate_descent(block):
    weights, grid, square, groups, rng = block
    within = square @ square.T + np.eye(len(square), dtype=np.float32)
    start = rng.integers(0, 16, weights.shape).astype(np.uint8)
    off = (start - grid.zeros[groups]) * grid.scales[groups] - weights

    def run():
        values, errors = start.copy(), off.astype(np.float32)
        block_feedback.descend_block(within @ errors, errors, weights, within, grid, groups, values)
        return values.tobytes(), errors.tobytes()

    numpy, native = both(block_feedback, run)
    assert numpy == native


@given(blocks(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_fitting_scales(block, is_half):
    weights, _, square, _, rng = block
    start = one_group(weights, is_half)
    values = rng.integers(0, 16, weights.shape).astype(np.uint8)
    values[:, 0] = start.zeros[0, 0]  # nothing to go by
    off, within = (values - start.zeros) * start.scales - weights, square @ square.T

    def run():
        of_steps = block_feedback.times_steps(within, values, start.zeros[0])
        np.testing.assert_allclose(of_steps, within @ (values - start.zeros), rtol=1e-4, atol=1e-4)
        grid = Grid(start.scales.copy(), start.zeros, start.dtype)
        gradient, errors = within @ off, off.copy()
        block_feedback.fit_scales(gradient, of_steps, weights, values, errors, grid, start.scales[0], 1.3)
        assert grid.scales[0, 0] == start.scales[0, 0]
        return grid.scales.tobytes(), gradient.tobytes(), errors.tobytes()

    numpy, native = both(block_feedback, run)
    assert numpy == native


@given(blocks(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_searching_scales(block, is_half):
    weights, _, square, _, _ = block
    whole = one_group(weights, is_half)
    base = Grid(whole.scales[0], whole.zeros[0], whole.dtype)
    moments = np.square(square[0])
    numpy, native = both(scale_search, lambda: scale_search._search_group(weights, moments, base))
    assert numpy.tobytes() == native.tobytes()
