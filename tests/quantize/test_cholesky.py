"""Factors and solutions block by block are those of the definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quantize.algorithms.cholesky import factorize

POOL = ThreadPoolExecutor(2)


@pytest.mark.parametrize("size", [1, 100, 128, 300, 1100])
def test_factors_and_solutions(size: int) -> None:
    rng = np.random.default_rng(size)
    inputs = rng.normal(size=(2 * size, size)) * np.exp(rng.normal(0, 2, size))  # columns of very different sizes
    matrix = inputs.T @ inputs / len(inputs)
    matrix += 0.05 * np.trace(matrix) / size * np.eye(size)
    right = rng.normal(size=(size, 7))
    factor = factorize(matrix.astype(np.float32), POOL)
    lower = np.tril(factor.lower).astype(np.float64)
    own = np.sqrt(np.diagonal(matrix))
    assert np.abs((lower @ lower.T - matrix) / np.outer(own, own)).max() < 1e-5
    found = right.astype(np.float32)
    factor.solve(found)
    expected = np.linalg.solve(matrix, right)
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)


def test_what_lies_above_the_diagonal_is_not_read() -> None:
    matrix = np.array([[4.0, np.nan], [2.0, 5.0]], np.float32)
    np.testing.assert_allclose(np.tril(factorize(matrix, POOL).lower), [[2, 0], [1, 2]])
