"""Factors and solutions block by block are those of the definition, and the matrix is given back as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from quantize.algorithms.arithmetic import arithmetic_of
from quantize.algorithms.cholesky import factorized
from quantize.algorithms.symmetric import damped, mirror, quadratic, reordered

POOL = ThreadPoolExecutor(2)
SIZES = pytest.mark.parametrize("size", [1, 100, 128, 300, 1100])


def covariance(size: int) -> npt.NDArray[np.float64]:
    """Of columns of very different sizes."""
    rng = np.random.default_rng(size)
    inputs = rng.normal(size=(2 * size, size)) * np.exp(rng.normal(0, 2, size))
    matrix = inputs.T @ inputs / len(inputs)
    return matrix + 0.05 * np.trace(matrix) / size * np.eye(size)


@SIZES
def test_factors_and_solutions(size: int) -> None:
    matrix, right = covariance(size), np.random.default_rng(1).normal(size=(size, 7))
    found, given = right.astype(np.float32), matrix.astype(np.float32)
    before = given.copy()
    with factorized(given, POOL) as factor:
        lower = np.tril(factor.lower).astype(np.float64)
        above = np.triu_indices(size, 1)
        np.testing.assert_array_equal(given[above], before[above])
        factor.solve(found)
    np.testing.assert_array_equal(given, before)
    own = np.sqrt(np.diagonal(matrix))
    assert np.abs((lower @ lower.T - matrix) / np.outer(own, own)).max() < 1e-5
    expected = np.linalg.solve(matrix, right)
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)


@SIZES
def test_what_is_done_to_a_matrix_for_a_while_is_undone(size: int) -> None:
    matrix = covariance(size).astype(np.float32)
    mirror(matrix, POOL)
    before, order = matrix.copy(), np.random.default_rng(2).permutation(size)
    with reordered(matrix, order, POOL), damped(matrix, 0.5):
        expected = before[order][:, order].astype(np.float64)
        expected += 0.5 * np.diagonal(before).mean(dtype=np.float64) * np.eye(size)
        np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    np.testing.assert_array_equal(matrix, before)


def test_it_is_given_back_even_after_an_error() -> None:
    matrix = np.array([[1.0, 2.0], [2.0, 1.0]], np.float32)
    before = matrix.copy()
    with pytest.raises(np.linalg.LinAlgError), factorized(matrix, POOL):
        pass
    np.testing.assert_array_equal(matrix, before)


def test_what_lies_below_the_diagonal_is_made_from_what_lies_above() -> None:
    matrix = np.array([[4.0, 2.0], [np.nan, 5.0]], np.float32)
    mirror(matrix, POOL, 0.5)
    np.testing.assert_array_equal(matrix, [[2, 1], [1, 2.5]])


@SIZES
@pytest.mark.parametrize(("bfloat16", "bound"), [(False, 1e-5), (True, 1e-2)])
def test_a_quadratic_form_takes_half_of_the_matrix(size: int, bfloat16: bool, bound: float) -> None:
    matrix = covariance(size).astype(np.float32)
    mirror(matrix, POOL)
    vectors = np.random.default_rng(3).normal(size=(size, 5)).astype(np.float32)
    exact = vectors.astype(np.float64)
    found = quadratic(matrix, vectors, POOL, arithmetic_of(bfloat16=bfloat16))
    assert found == pytest.approx(np.vdot(matrix.astype(np.float64) @ exact, exact), rel=bound)
