"""Top-k and nucleus without sorting the vocabulary: a linear pass leaves few candidates, only those are sorted.

Ties are broken by token id, lowest first, so that a result is one and the same on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_NUM_GROUPS_PER_K = 4
_NUCLEUS_CANDIDATES = 1024


def top_k(values: FloatArray, k: int) -> IntArray:
    """Token ids of the k largest of ``values`` [vocab], largest first, int64 [min(k, vocab)]."""
    vocab_size = len(values)
    if k >= vocab_size:
        return _sorted(values, np.arange(vocab_size))
    return _sorted(values, np.flatnonzero(values >= _at_most_kth_largest(values, k)))[:k]


def _at_most_kth_largest(values: FloatArray, k: int) -> np.float32:
    """A bound that at least k values reach: the k-th largest of the maxima of disjoint groups.

    Strided groups make the maxima one pass over long rows, ten times faster than a partition of the vocabulary.
    """
    num_groups = 1 << (_NUM_GROUPS_PER_K * k - 1).bit_length()
    if num_groups * 4 > len(values):
        return np.partition(values, len(values) - k)[len(values) - k]  # type: ignore[no-any-return]
    grouped = values[: len(values) // num_groups * num_groups].reshape(-1, num_groups)
    maxima = grouped.max(axis=0)
    return np.partition(maxima, num_groups - k)[num_groups - k]  # type: ignore[no-any-return]


def nucleus(weights: FloatArray, total: float, top_p: float) -> IntArray:
    """Ids of the smallest set of likeliest tokens that holds ``top_p`` of the mass, likeliest first, int64 [n >= 1].

    ``weights`` [vocab] are probabilities times ``total``, their sum; 0 < top_p < 1.
    Every token above some weight is a candidate; such a set holds the nucleus once it holds ``top_p`` of the mass.
    No more than 1024 tokens can each have 1/1024 of the mass: when these do not suffice, tokens below
    ``(1 - top_p) / vocab`` cannot hold more than ``1 - top_p`` together, so all others do.
    """
    candidates = np.flatnonzero(weights >= total / _NUCLEUS_CANDIDATES)
    if weights[candidates].sum(dtype=np.float64) < top_p * total:
        # A hair lower than the bound, for the bound itself is rounded to float32 in the comparison.
        bound = 0.999 * (1.0 - top_p) * total / len(weights)
        candidates = np.flatnonzero(weights >= bound)
    return cut_nucleus(weights, _sorted(weights, candidates), total, top_p)


def cut_nucleus(weights: FloatArray, ranked: IntArray, total: float, top_p: float) -> IntArray:
    """The shortest beginning of ``ranked``, ids by falling weight, that holds ``top_p`` of ``total``; never empty."""
    mass = np.cumsum(weights[ranked], dtype=np.float64)
    return ranked[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]


def _sorted(values: FloatArray, ids: IntArray) -> IntArray:
    return ids[np.argsort(-values[ids], kind="stable")]
