"""Products of calibration: tiles in any order of threads, factors of float32 and of bfloat16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.algorithms.arithmetic import arithmetic_of, product
from quantize.algorithms.symmetric import mirror
from quantize.calibration.products import Products
from quantize.calibration.settings import Precision
from quantize.native.products import native_products

POOL = ThreadPoolExecutor(2)
Float32 = npt.NDArray[np.float32]


def as_factors(values: Float32, precision: Precision) -> npt.NDArray[np.float64]:
    """What a product is taken of; without the processor's instructions that is float32."""
    is_rounded = precision == "bfloat16" and native_products() is not None
    return (values.astype(ml_dtypes.bfloat16) if is_rounded else values).astype(np.float64)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@given(
    num_tokens=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_sums_of_products_are_those_of_the_definition(
    precision: Precision, num_tokens: list[int], sizes: tuple[int, int], seed: int
) -> None:
    """Odd numbers of tokens and ragged panels included; float32 sums, whose error grows with their terms."""
    rng = np.random.default_rng(seed)
    left, right = ([rng.normal(size=(n, size)).astype(np.float32) for n in num_tokens] for size in sizes)
    products = Products(POOL, precision)
    factors = products.of(left)
    gram, cross = np.zeros((sizes[0], sizes[0]), np.float32), np.ones(sizes, np.float32)
    factors.add_gram(gram)
    mirror(gram, POOL)
    factors.add_cross(cross, products.of(right))
    x, y = (np.concatenate([as_factors(part, precision) for part in parts]) for parts in (left, right))
    bound = 2.0**-24 * sum(num_tokens)
    assert (np.abs(gram - x.T @ x) <= bound * (np.abs(x).T @ np.abs(x)) + 1e-30).all()
    assert (np.abs(cross - 1 - x.T @ y) <= bound * (np.abs(x).T @ np.abs(y) + 1) + 1e-6).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@given(
    num_tokens=st.integers(1, 300),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    places=st.tuples(st.integers(0, 149), st.integers(0, 149)),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_tokens_of_a_factor_are_replaced_and_left_out(
    precision: Precision, num_tokens: int, sizes: tuple[int, int], places: tuple[int, int], seed: int
) -> None:
    """As GPTQ does with errors that are settled block by block, and AWQ with half of a symmetric matrix."""
    rng = np.random.default_rng(seed)
    arithmetic = arithmetic_of(bfloat16=precision == "bfloat16")
    replaced, first = (min(2 * place, num_tokens - num_tokens % 2) for place in places)
    left, right = (rng.normal(size=(num_tokens, size)).astype(np.float32) for size in sizes)
    packed, new = arithmetic.pack(right.copy()), right[replaced:] * np.float32(3)
    arithmetic.replace(packed, replaced, new)
    found = product(arithmetic, arithmetic.rest(arithmetic.pack(left), first), arithmetic.rest(packed, first), sizes)
    x, y = (as_factors(part, precision) for part in (left, np.concatenate([right[:replaced], new])))
    bound = 2.0**-24 * (num_tokens + 1) * (np.abs(x).T @ np.abs(y)) + 1e-30
    assert (np.abs(found - x[first:].T @ y[first:]) <= bound).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_they_do_not_depend_on_the_threads(precision: Precision) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(40, 1100)).astype(np.float32) for _ in range(3)]
    results = []
    for threads in (1, 3):
        with ThreadPoolExecutor(threads) as pool:
            gram, cross = np.zeros((1100, 1100), np.float32), np.zeros((1100, 5), np.float32)
            products = Products(pool, precision)
            products.of(parts).add_gram(gram)
            mirror(gram, pool, np.float32(0.5))
            products.of(parts).add_cross(cross, products.of([part[:, :5] for part in parts]))
            results.append((gram, cross))
    whole = np.concatenate([as_factors(part, precision) for part in parts])
    np.testing.assert_allclose(results[0][0], whole.T @ whole / 2, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[0][1], whole.T @ whole[:, :5], rtol=1e-4, atol=1e-4)
    assert all(np.array_equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inputs_that_overflow_are_seen_in_the_sums(precision: Precision) -> None:
    gram = np.zeros((20, 20), np.float32)
    inputs = np.ones((3, 20), np.float32)
    inputs[1, 7], inputs[2, 19] = np.inf, np.nan
    Products(POOL, precision).of([inputs]).add_gram(gram)
    assert np.isinf(gram[7, 7]) and np.isnan(gram[19, 19]) and gram[3, 3] == 3
