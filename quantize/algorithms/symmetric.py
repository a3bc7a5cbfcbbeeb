"""Symmetric matrices that are changed in place and given back as they were: the largest arrays of calibration."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic, product
from quantize.tiles import run_all, tiles

Float32 = npt.NDArray[np.float32]

_BLOCK = 128


def mirror(matrix: Float32, pool: Executor, scale: float | np.float32 = 1.0) -> None:
    """What is above the diagonal, and the diagonal, times ``scale``; the half below it becomes their image."""

    def finish(rows: slice) -> None:
        if scale != 1:
            matrix[rows, rows.start :] *= np.float32(scale)
        square = matrix[rows, rows]
        np.copyto(square, square.T, where=np.tri(len(square), k=-1, dtype=bool))
        matrix[rows.stop :, rows] = matrix[rows, rows.stop :].T

    run_all(pool, finish, tiles(len(matrix)))


def quadratic(matrix: Float32, vectors: Float32, pool: Executor, arithmetic: Arithmetic[Any]) -> float:
    """tr(X'GX) of G [n, n] and X [n, m]: half of the products, as those on both sides of the diagonal are equal."""
    factor = arithmetic.pack(vectors)

    def of_rows(begin: int) -> float:
        own = vectors[begin : begin + _BLOCK]
        below = matrix[begin:, begin : begin + _BLOCK].copy()
        below[: len(own)] *= np.float32(0.5)  # all else is there once more, above the diagonal
        found = product(arithmetic, arithmetic.pack(below), arithmetic.rest(factor, begin), own.shape)
        return float(np.einsum("nm,nm->n", found, own).sum(dtype=np.float64))

    return 2 * sum(pool.map(of_rows, range(0, len(matrix), _BLOCK)))  # in their order, whichever ends first


def mean_diagonal(gram: Float32, factors: Float32 | None = None) -> np.float32:
    """E[x^2] over all columns, of the inputs before they were divided by ``factors`` [in]."""
    squares = np.ones(len(gram), np.float32) if factors is None else np.square(factors)
    return np.float32(np.einsum("ii,i->", gram, squares, dtype=np.float64) / len(gram))


@contextmanager
def damped(gram: Float32, damping: float, factors: Float32 | None = None) -> Iterator[Float32]:
    """The Gram matrix [in, in] with ``damping`` times its mean on the diagonal: columns that saw nothing stay solvable.

    ``factors`` [in], that the inputs were divided by: mean and damping are those of the inputs before. Large columns
    then damp the small ones as much as they would have without AWQ, which makes all alike.
    """
    diagonal = np.einsum("ii->i", gram)
    before, mean = diagonal.copy(), mean_diagonal(gram, factors)
    diagonal += np.float32(damping) * (mean if mean > 0 else 1) / (1 if factors is None else np.square(factors))
    try:
        yield gram
    finally:
        diagonal[:] = before


@contextmanager
def reordered(matrix: Float32, order: npt.NDArray[np.int64], pool: Executor) -> Iterator[Float32]:
    """``matrix[order][:, order]``"""
    _reorder(matrix, order, pool)
    try:
        yield matrix
    finally:
        _reorder(matrix, np.argsort(order), pool)


def _reorder(matrix: Float32, order: npt.NDArray[np.int64], pool: Executor) -> None:
    _move_rows(matrix, order.tolist())

    def move_columns(rows: slice) -> None:
        matrix[rows] = matrix[rows].take(order, axis=1)

    run_all(pool, move_columns, tiles(len(matrix)))


def _move_rows(matrix: Float32, order: list[int]) -> None:
    """Along each cycle of the permutation, so that one row alone is held aside."""
    is_in_place = [False] * len(order)
    for start in range(len(order)):
        if is_in_place[start]:
            continue
        first, place = matrix[start].copy(), start
        while order[place] != start:
            matrix[place] = matrix[order[place]]
            is_in_place[place], place = True, order[place]
        matrix[place] = first
        is_in_place[place] = True
