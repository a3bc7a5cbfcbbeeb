"""Which of several scales costs the blocks of a matrix the least squared error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.float4 import round_e2m1

Float32 = npt.NDArray[np.float32]

_SLICE_VALUES = 2**15  # of one slice: its four arrays stay in a core's second-level cache over all candidates


def best_e2m1_scales(magnitudes: Float32, candidates: Float32) -> npt.NDArray[np.intp]:
    """For each block the index of the candidate with the least squared error after rounding to E2M1; ties: the first.

    ``magnitudes`` is [block_size, num_blocks], ``candidates`` [num_candidates, num_blocks], finite and above zero.
    """
    step = max(1, _SLICE_VALUES // len(magnitudes))
    starts = range(0, magnitudes.shape[1], step)
    return np.concatenate([_best(magnitudes[:, s : s + step], candidates[:, s : s + step]) for s in starts])


def _best(magnitudes: Float32, candidates: Float32) -> npt.NDArray[np.intp]:
    steps, rounded = np.empty(magnitudes.shape, np.float32), np.empty(magnitudes.shape, np.float32)
    scratch = np.empty(magnitudes.shape, np.uint32)
    errors = np.empty(candidates.shape, np.float32)
    for scales, error in zip(candidates, errors, strict=True):
        np.multiply(magnitudes, 1 / scales, out=steps)
        round_e2m1(steps, rounded, scratch)
        np.subtract(rounded, steps, out=rounded)
        np.multiply(rounded, rounded, out=rounded)
        # In units of the first scale, so that neither huge nor tiny weights leave float32.
        np.multiply(rounded.sum(axis=0), np.square(scales / candidates[0]), out=error)
    return np.asarray(errors.argmin(axis=0), np.intp)
