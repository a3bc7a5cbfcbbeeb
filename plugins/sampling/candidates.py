"""Top-k and nucleus as sets of token ids, without sorting the vocabulary.

Ties are broken by token id, lowest first, so that a set is one and the same on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_NUM_GROUPS_PER_K = 4
_BUCKET_SHIFT = 18  # leaves the exponent and 5 bits of the mantissa: 32 buckets for each factor of two


def top_k(values: FloatArray, k: int) -> IntArray:
    """Token ids of the k largest of ``values`` [vocab], in no order, int64 [min(k, vocab)]."""
    if k >= len(values):
        return np.arange(len(values))
    ids = np.flatnonzero(values >= _at_most_kth_largest(values, k))
    reached = values[ids]
    kth_largest = np.partition(reached, len(reached) - k)[len(reached) - k]
    above = ids[reached > kth_largest]
    return np.concatenate([above, ids[reached == kth_largest][: k - len(above)]])


def _at_most_kth_largest(values: FloatArray, k: int) -> np.float32:
    """A bound that at least k values reach: the k-th largest of the maxima of disjoint groups.

    Strided groups make the maxima one pass over long rows, ten times faster than a partition of the vocabulary.
    """
    num_groups = 1 << (_NUM_GROUPS_PER_K * k - 1).bit_length()
    if num_groups * 4 > len(values):
        return np.partition(values, len(values) - k)[len(values) - k]  # type: ignore[no-any-return]
    maxima = values[: len(values) // num_groups * num_groups].reshape(-1, num_groups).max(axis=0)
    return np.partition(maxima, num_groups - k)[num_groups - k]  # type: ignore[no-any-return]


def nucleus(weights: FloatArray, total: float, top_p: float) -> IntArray:
    """Ids of the smallest set of likeliest tokens that holds ``top_p`` of the mass, in no order, int64 [n >= 1].

    ``weights`` [vocab] are probabilities times ``total``, their sum; 0 < top_p < 1.
    Tokens lighter than ``(1 - top_p) * total / vocab`` hold less than ``1 - top_p`` together, so the others hold the
    nucleus. Those are counted into buckets by the leading bits of their floats, which order as the floats do; the
    buckets' mass tells where the nucleus ends, and only the bucket where it ends is sorted.
    """
    # A hair below the bound, for it is rounded to float32 in the comparison.
    candidates = np.flatnonzero(weights >= 0.999 * (1.0 - top_p) * total / len(weights))
    masses = weights[candidates]
    buckets = masses.view(np.int32) >> _BUCKET_SHIFT
    buckets -= buckets.min()
    falling = np.bincount(buckets, weights=masses)[::-1]
    reached = np.cumsum(falling)
    last = min(int(np.searchsorted(reached, top_p * total)), len(falling) - 1)
    bucket = len(falling) - 1 - last
    inside = candidates[buckets == bucket]
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    before = reached[last] - falling[last]
    num_inside = int(np.searchsorted(before + np.cumsum(weights[inside], dtype=np.float64), top_p * total)) + 1
    return np.concatenate([candidates[buckets > bucket], inside[:num_inside]])
