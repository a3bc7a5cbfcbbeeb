"""Cholesky factors in half of the matrix itself, block by block on a pool: LAPACK takes three more matrices.

float32 is enough: the backward error of each entry is relative to its row's and column's own diagonal entries
(Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.3), and what is factorized is damped.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantize.algorithms.symmetric import mirror
from quantize.tiles import run_all, tiles

Float32 = npt.NDArray[np.float32]

_BLOCK = 128


@dataclass(frozen=True)
class CholeskyFactor:
    """H = L L'."""

    lower: Float32  # L [n, n] on and below the diagonal
    inverses: tuple[Float32, ...]  # of the blocks of L on the diagonal

    def solve(self, right: Float32) -> None:
        """``right`` [n, m] becomes H^-1 times it."""
        blocks = list(zip(_blocks(len(self.lower)), self.inverses, strict=True))
        for rows, inverse in blocks:
            rest = right[rows] - self.lower[rows, : rows.start] @ right[: rows.start]
            right[rows] = inverse @ rest
        for rows, inverse in reversed(blocks):
            rest = right[rows] - self.lower[rows.stop :, rows].T @ right[rows.stop :]
            right[rows] = inverse.T @ rest


@contextmanager
def factorized(matrix: Float32, pool: Executor) -> Iterator[CholeskyFactor]:
    """``matrix`` [n, n], symmetric and positive definite, with its factor in the half below until the end."""
    diagonal = np.diagonal(matrix).copy()
    try:
        yield _factorize(matrix, pool)
    finally:
        mirror(matrix, pool)
        np.einsum("ii->i", matrix)[:] = diagonal


def _factorize(matrix: Float32, pool: Executor) -> CholeskyFactor:
    inverses = []
    for rows in _blocks(len(matrix)):
        diagonal = np.linalg.cholesky(matrix[rows, rows].astype(np.float64))
        inverse = np.linalg.inv(diagonal).astype(np.float32)
        np.copyto(matrix[rows, rows], diagonal, where=np.tri(len(diagonal), dtype=bool), casting="same_kind")
        inverses.append(inverse)
        below = matrix[rows.stop :]
        if len(below):
            _subtract(below, rows, inverse, pool)
    return CholeskyFactor(matrix, tuple(inverses))


def _subtract(below: Float32, columns: slice, inverse: Float32, pool: Executor) -> None:
    """Of the rows ``below`` a block of the diagonal: its columns, and what these take from the columns to come."""
    places = tiles(len(below))
    panel = below[:, columns]

    def scale(rows: slice) -> None:
        panel[rows] = panel[rows] @ inverse.T

    def subtract(place: tuple[slice, slice]) -> None:
        rows, others = place
        taken = panel[rows] @ panel[others].T
        if rows == others:
            taken = np.tril(taken)  # what is above the diagonal is still the matrix
        below[rows, columns.stop + others.start : columns.stop + others.stop] -= taken

    run_all(pool, scale, places)
    run_all(pool, subtract, [(rows, others) for rows in places for others in places if others.start <= rows.start])


def _blocks(size: int) -> list[slice]:
    return [slice(begin, min(begin + _BLOCK, size)) for begin in range(0, size, _BLOCK)]
