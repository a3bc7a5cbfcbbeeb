"""Largest magnitudes of whole tensors: what a scale of the whole tensor needs before the first row can be rounded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.checkpoint import Checkpoint

CHUNK_VALUES = 2**17  # of one task: its float32 arrays stay in a core's second-level cache


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
        step = max(1, CHUNK_VALUES // num_columns)
        return max(self._pool.map(lambda begin: self._measure_chunk(name, begin, step), range(0, num_rows, step)))

    def _measure_chunk(self, name: str, begin: int, step: int) -> np.float32:
        end = min(begin + step, self._checkpoint.info(name).shape[0])
        rows = self._checkpoint.load_rows(name, begin, end).astype(np.float32, copy=False)
        largest = np.float32(max(rows.max(), -rows.min()))
        if not np.isfinite(largest):
            check_finite(name, rows, begin, "is not finite; the source is damaged")
        return largest


def check_finite(name: str, rows: npt.NDArray[Any], begin: int, problem: str) -> None:
    """Raise QuantizeError naming the first of the rows ``begin`` ... that holds NaN or infinity."""
    finite = np.isfinite(rows)
    if not finite.all():
        row = begin + int(np.argwhere(~finite)[0][0])
        raise QuantizeError(f"tensor {name!r}: a value in row {row} {problem}")
