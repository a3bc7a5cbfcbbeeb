"""Largest magnitudes of whole tensors: what a scale of the whole tensor needs before the first row can be rounded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.checkpoint import Checkpoint
from quantize.finite import bad_row, check_finite
from quantize.native.kernels import DamagedRowError, native_kernels

_NUMPY_CHUNK = 2**17  # values of one task: its float32 arrays stay in a core's second-level cache
_NATIVE_CHUNK = 2**20  # the kernels hold a row or a few groups in the cache; fewer and larger writes


def rows_per_chunk(num_columns: int) -> int:
    """Rows that one task takes."""
    values = _NUMPY_CHUNK if native_kernels() is None else _NATIVE_CHUNK
    return max(1, values // num_columns)


class Magnitudes:
    """Each tensor is read once for it, in chunks over ``pool``. Raises QuantizeError for NaN and infinity."""

    def __init__(self, checkpoint: Checkpoint, pool: Executor) -> None:
        self._checkpoint = checkpoint
        self._pool = pool
        self._largest: dict[str, np.float32] = {}

    def largest(self, names: Sequence[str]) -> np.float32:
        """The largest magnitude in any of the matrices ``names``."""
        for name in names:
            if name not in self._largest:
                self._largest[name] = self._measure(name)
        return max(self._largest[name] for name in names)

    def _measure(self, name: str) -> np.float32:
        num_rows, num_columns = self._checkpoint.info(name).shape
        step = rows_per_chunk(num_columns)
        return max(self._pool.map(lambda begin: self._measure_chunk(name, begin, step), range(0, num_rows, step)))

    def _measure_chunk(self, name: str, begin: int, step: int) -> np.float32:
        end = min(begin + step, self._checkpoint.info(name).shape[0])
        return measure(name, self._checkpoint.load_rows(name, begin, end), begin)[0]


def measure(name: str, source: npt.NDArray[Any], begin: int) -> tuple[np.float32, float]:
    """Largest magnitude and squared norm of rows from ``begin`` on. Raises QuantizeError for NaN and infinity."""
    kernels = native_kernels()
    rows = source.reshape(len(source), -1)
    if kernels is not None and kernels.takes(source.dtype):
        try:
            return kernels.measure(rows)
        except DamagedRowError as error:
            raise bad_row(name, begin + error.row) from None
    rows = rows.astype(np.float32, copy=False)
    check_finite(name, rows, begin)
    return np.float32(max(rows.max(), -rows.min())), float(np.square(rows, dtype=np.float64).sum())
