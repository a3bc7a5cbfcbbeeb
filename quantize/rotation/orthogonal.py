"""Orthogonal matrices that spread every coordinate over all others, applied without ever being written out."""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_LARGEST_HADAMARD = 32  # of one factor: the fewest operations for the sizes that models have


class RandomHadamard:
    """Q = diag(signs) (H x ... x H x C) / sqrt(size), a Kronecker product of small factors (QuaRot, arXiv 2404.00456).

    H are Hadamard matrices, for the powers of two in ``size``; C is the Hartley matrix cos + sin of what is left, as
    5 of 5120 or 9 of 576. No entry of Q is large, so that an outlier becomes a little of everything.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), size)
        self._factors = _factors(size)

    def apply(self, rows: Float32) -> Float32:
        """x Q along the last axis of ``rows`` [..., size]."""
        shape = tuple(len(factor) for factor in self._factors)
        turned = (rows * self._signs).reshape(-1, *shape)
        for axis, factor in enumerate(self._factors, 1):
            turned = np.moveaxis(np.moveaxis(turned, axis, -1) @ factor, -1, axis)
        return np.ascontiguousarray(turned, np.float32).reshape(rows.shape)

    def matrix(self) -> Float32:
        """Q itself, [size, size]."""
        return self.apply(np.eye(self.size, dtype=np.float32))


def _factors(size: int) -> list[Float32]:
    factors = []
    while size % 2 == 0:
        order = min(size & -size, _LARGEST_HADAMARD)
        factors.append(_hadamard(order))
        size //= order
    if size > 1 or not factors:
        factors.append(_hartley(size))
    return factors


def _hadamard(order: int) -> Float32:
    """Sylvester's construction, scaled to be orthogonal."""
    doublings = order.bit_length() - 1
    matrix = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * doublings, np.eye(1))
    return np.asarray(matrix / np.sqrt(order), np.float32)


def _hartley(size: int) -> Float32:
    angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
    return np.asarray((np.cos(angles) + np.sin(angles)) / np.sqrt(size), np.float32)
