"""Int4 values chosen by what the inputs look like: each method does what it promises, on inputs where it matters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.algorithms.arithmetic import arithmetic_of
from quantize.algorithms.awq import search_factors
from quantize.algorithms.gptq import gptq
from quantize.algorithms.grid import Grid, decode, encode, range_grid
from quantize.algorithms.refine import descend, refine
from quantize.algorithms.scale_search import search_grid
from quantize.algorithms.symmetric import damped
from quantize.algorithms.targets import corrected_targets
from quantize.calibration.gram import Exact, Gram
from quantize.calibration.products import Products
from quantize.weight_rule import Int4Settings

POOL = ThreadPoolExecutor(2)
PRODUCTS = Products(POOL)
FLOAT32 = arithmetic_of(bfloat16=False)
IN, OUT, GROUP = 128, 48, 32


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (IN, OUT)).astype(np.float32)


def correlated_inputs(seed: int = 1, num_tokens: int = 600) -> np.ndarray:
    """Few directions, some channels a hundred times larger than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(num_tokens, 24)) @ rng.normal(size=(24, IN)) + 0.3 * rng.normal(size=(num_tokens, IN))
    return (mixed * np.exp(rng.normal(0, 1.2, IN))).astype(np.float32)


def output_error(inputs: np.ndarray, change: np.ndarray) -> float:
    return float(np.square(inputs.astype(np.float64) @ change).sum())


def int4(method: Any, scale: Any = "mse", symmetric: bool = True, act_order: bool = False) -> Int4Settings:
    return Int4Settings(GROUP, symmetric, scale, method, act_order)


def gram_of(inputs: np.ndarray) -> np.ndarray:
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_gram_matrix_is_that_of_all_inputs_together(sizes: list[int], seed: int) -> None:
    inputs = np.random.default_rng(seed).normal(size=(sum(sizes), 7)).astype(np.float32)
    gram, diagonal = Gram(7, PRODUCTS), Gram(7, PRODUCTS, full=False)
    for part in np.split(inputs, np.cumsum(sizes)[:-1]):
        gram.add([part])
        diagonal.add([part])
    expected = inputs.astype(np.float64).T @ inputs.astype(np.float64) / len(inputs)
    np.testing.assert_allclose(gram.matrix(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(diagonal.mean_square, np.diagonal(expected), rtol=1e-5)
    assert gram.num_tokens == sum(sizes)
    with pytest.raises(ValueError, match="diagonal"):
        diagonal.matrix()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_whole_range_is_within_half_a_step(symmetric: bool) -> None:
    w = weights()
    grid = range_grid(w, GROUP, symmetric=symmetric)
    values = encode(w, grid)
    assert values.min() >= 0 and values.max() <= 15 and grid.dtype == np.float16
    steps = np.repeat(grid.scales, GROUP, axis=0)
    assert (np.abs(decode(values, grid) - w) <= 0.51 * steps).all()


def test_tiny_weights_and_zeros_have_usable_scales() -> None:
    w = weights() * np.float32(1e-9)
    w[:GROUP] = 0
    grid = range_grid(w, GROUP, symmetric=True)
    assert grid.dtype == np.float32 and (grid.scales > 0).all()
    assert (decode(encode(w, grid), grid)[:GROUP] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_importance_lowers_the_weighted_error(symmetric: bool) -> None:
    w, inputs = weights(), correlated_inputs()
    importance = np.square(inputs).mean(axis=0)

    def weighted(grid: Grid) -> float:
        return float((np.square(decode(encode(w, grid), grid) - w) * importance[:, None]).sum())

    whole = range_grid(w, GROUP, symmetric=symmetric)
    plain = search_grid(w, GROUP, np.ones(IN, np.float32), POOL, symmetric=symmetric)
    found = search_grid(w, GROUP, importance, POOL, symmetric=symmetric)
    assert weighted(found) < 0.9 * weighted(plain) and weighted(found) < 0.9 * weighted(whole)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_gptq_beats_rounding_on_correlated_inputs(act_order: bool, symmetric: bool, scale: str, bfloat16: bool) -> None:
    w, inputs = weights(), correlated_inputs()
    chosen = int4("gptq", scale, symmetric, act_order)
    values, grid = gptq(w, gram_of(inputs), chosen, POOL, arithmetic_of(bfloat16=bfloat16))
    nearest = range_grid(w, GROUP, symmetric=symmetric)
    rounded = output_error(inputs, decode(encode(w, nearest), nearest) - w)
    assert output_error(inputs, decode(values, grid) - w) < 0.5 * rounded
    assert values.min() >= 0 and values.max() <= 15


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_gptq_without_correlations_is_rounding_to_nearest(act_order: bool, scale: str) -> None:
    w, identity = weights(), np.eye(IN, dtype=np.float32)
    values, grid = gptq(w, identity, int4("gptq", scale, act_order=act_order), POOL, FLOAT32)
    ones = np.ones(IN, np.float32)
    expected = (
        range_grid(w, GROUP, symmetric=True) if scale == "absmax" else search_grid(w, GROUP, ones, POOL, symmetric=True)
    )
    np.testing.assert_array_equal(grid.scales, expected.scales)
    np.testing.assert_array_equal(values, encode(w, expected))


def test_gptq_is_the_papers_algorithm() -> None:
    """Against a plain reading of the paper's: the inverse is updated, and every rounding changes all later columns."""
    w, gram = weights(), gram_of(correlated_inputs())
    chosen = int4("gptq", "absmax")
    values, grid = gptq(w, gram, chosen, POOL, FLOAT32)
    hessian = gram.astype(np.float64)
    hessian += np.eye(IN) * chosen.damping * np.diagonal(hessian).mean()
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    remaining, expected = w.astype(np.float64), np.empty(w.shape)
    scales, zeros = (np.repeat(part, GROUP, axis=0) for part in (grid.scales, grid.zeros))
    for k in range(IN):
        expected[k] = np.clip(np.rint(remaining[k] / scales[k]) + zeros[k], 0, 15)
        error = (remaining[k] - (expected[k] - zeros[k]) * scales[k]) / upper[k, k]
        remaining[k:] -= np.outer(upper[k, k:], error)
    assert (values == expected).mean() > 0.999, "but for ties that float32 decides otherwise"


def test_gptq_takes_inputs_that_were_never_seen() -> None:
    inputs = correlated_inputs(num_tokens=20)
    inputs[:, 5] = 0
    for gram in (gram_of(inputs), np.zeros((IN, IN), np.float32)):
        values, grid = gptq(weights(), gram, int4("gptq"), POOL, FLOAT32)
        assert np.isfinite(decode(values, grid)).all()


def test_awq_factors_lower_the_output_error_and_dead_columns_do_no_harm() -> None:
    w, inputs = weights(), correlated_inputs()
    inputs[:, 7] = 0
    gram = gram_of(inputs)
    factors = search_factors(w, gram, np.square(inputs).mean(axis=0), int4("awq"), POOL, FLOAT32)
    assert np.isfinite(factors).all() and (factors > 0).all()

    def error(by: np.ndarray) -> float:
        scaled = w * by[:, None]
        grid = range_grid(scaled, GROUP, symmetric=True)
        return output_error(inputs, decode(encode(scaled, grid), grid) / by[:, None] - w)

    assert error(factors) < 0.8 * error(np.ones(IN, np.float32))
    alike = np.ones(IN, np.float32)
    np.testing.assert_array_equal(search_factors(w, gram, alike, int4("awq"), POOL, FLOAT32), alike)


@pytest.mark.parametrize("by", ["inputs", "outputs"])
def test_drifted_inputs_are_made_good(by: str) -> None:
    """The unquantized model has ``exact`` inputs, its quantized copy others: the target brings back its outputs."""
    w, exact = weights(), correlated_inputs(num_tokens=4000)
    inputs = exact + 0.2 * exact @ np.random.default_rng(5).normal(0, IN**-0.5, (IN, IN)).astype(np.float32)
    gram = Gram(IN, PRODUCTS)
    for begin in range(0, 4000, 1000):
        rows = slice(begin, begin + 1000)
        gram.add([inputs[rows]], Exact(inputs=[exact[rows]]) if by == "inputs" else Exact(outputs=[exact[rows] @ w]))
    missing = gram.missing(w)
    assert missing is not None
    expected = inputs.T @ ((exact - inputs) @ w) / 4000
    np.testing.assert_allclose(missing, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    targets = corrected_targets(w, gram.matrix(), missing, POOL)

    def error(candidate: np.ndarray) -> float:
        return float(np.square(exact.astype(np.float64) @ w - inputs.astype(np.float64) @ candidate).sum())

    assert error(targets) < 0.5 * error(w)
    values, grid = gptq(targets, gram.matrix(), int4("gptq"), POOL, FLOAT32)
    plain, plain_grid = gptq(w, gram.matrix(), int4("gptq"), POOL, FLOAT32)
    assert error(decode(values, grid)) < 0.7 * error(decode(plain, plain_grid))


def test_without_drift_or_inputs_the_target_is_the_weights() -> None:
    w, gram = weights(), gram_of(correlated_inputs())
    np.testing.assert_array_equal(corrected_targets(w, gram, np.zeros_like(w), POOL), w)
    np.testing.assert_array_equal(corrected_targets(w, np.zeros_like(gram), np.zeros_like(w), POOL), w)
    assert Gram(IN, PRODUCTS).missing(w) is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_integers_and_scales_that_settle_together_lower_the_output_error(symmetric: bool, bfloat16: bool) -> None:
    w, inputs = weights(), correlated_inputs()
    gram, chosen = gram_of(inputs), int4("awq", symmetric=symmetric)
    grid = search_grid(w, GROUP, np.diagonal(gram), POOL, symmetric=symmetric)
    values, better = refine(w, (encode(w, grid), grid), gram, chosen, POOL, arithmetic_of(bfloat16=bfloat16))
    before, after = (output_error(inputs, decode(*pair) - w) for pair in ((encode(w, grid), grid), (values, better)))
    assert after < 0.7 * before
    assert values.min() >= 0 and values.max() <= 15 and (values == np.rint(values)).all()
    np.testing.assert_array_equal(better.scales, better.scales.astype(np.float16))
    np.testing.assert_array_equal(better.zeros, grid.zeros)


@given(seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_a_sweep_over_the_columns_never_raises_the_error(seed: int) -> None:
    w, inputs = weights(seed), correlated_inputs(seed, num_tokens=60)
    grid = range_grid(w, GROUP, symmetric=True)
    values, errors = encode(w, grid), []
    with damped(gram_of(inputs), 0.05) as hessian:
        for _ in range(3):
            change = decode(values, grid) - w
            errors.append(float(np.einsum("io,ij,jo->", change, hessian, change, dtype=np.float64, optimize=True)))
            for group in range(IN // GROUP):
                rows = slice(group * GROUP, (group + 1) * GROUP)
                own = Grid(grid.scales[group : group + 1], grid.zeros[group : group + 1], grid.dtype)
                gradient = hessian[rows] @ change
                descend(w[rows], values[rows], change[rows], own, hessian[rows, rows], gradient)
            np.testing.assert_array_equal(change, decode(values, grid) - w)
    assert errors[0] >= errors[1] >= errors[2] * (1 - 1e-6)


def test_refining_survives_groups_of_zeros_and_inputs_never_seen() -> None:
    w = weights()
    w[:GROUP] = 0
    grid = range_grid(w, GROUP, symmetric=True)
    for gram in (gram_of(correlated_inputs(num_tokens=10)), np.zeros((IN, IN), np.float32)):
        values, better = refine(w, (encode(w, grid), grid), gram, int4("awq"), POOL, FLOAT32)
        assert np.isfinite(better.scales).all() and (better.scales > 0).all()
        assert (decode(values, better)[:GROUP] == 0).all()


def test_factors_change_nothing_about_the_target() -> None:
    """Inputs divided by factors and weights multiplied: the same model, damped the same."""
    w, exact = weights(), correlated_inputs(num_tokens=1000)
    inputs = exact + np.random.default_rng(6).normal(0, 0.3, exact.shape).astype(np.float32)
    factors = np.exp(np.random.default_rng(7).normal(0, 1, IN)).astype(np.float32)
    plain, scaled = Gram(IN, PRODUCTS), Gram(IN, PRODUCTS)
    plain.add([inputs], Exact(inputs=[exact]))
    scaled.add([inputs / factors], Exact(inputs=[exact]))
    w_scaled = w * factors[:, None]
    missing, scaled_missing = plain.missing(w), scaled.missing(w_scaled, factors)
    assert missing is not None and scaled_missing is not None
    expected = corrected_targets(w, plain.matrix(), missing, POOL)
    found = corrected_targets(w_scaled, scaled.matrix(), scaled_missing, POOL, factors) / factors[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
