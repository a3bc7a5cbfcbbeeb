"""Products of tall matrices in tiles over the pool's threads, each of which computes with one.

A tile is always the same sum in the same order, whichever thread computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic, arithmetic_of
from quantize.calibration.settings import Precision
from quantize.native.products import PANEL
from quantize.tiles import run_all, tiles

Float32 = npt.NDArray[np.float32]
F = TypeVar("F")


@dataclass(frozen=True)
class Products:
    """Sums of X'Y over parts X [num_tokens, in] and Y [num_tokens, out]: float32, of factors in ``precision``."""

    pool: Executor
    precision: Precision = "float32"

    def of(self, parts: Sequence[Float32]) -> Factors[Any]:
        """Factors of any number of products."""
        return Factors(self.pool, self.arithmetic, list(self.pool.map(self.arithmetic.pack, parts)))

    @cached_property
    def arithmetic(self) -> Arithmetic[Any]:
        return arithmetic_of(bfloat16=self.precision == "bfloat16")


@dataclass(frozen=True)
class Factors(Generic[F]):
    """What ``Products.of`` made of parts."""

    pool: Executor
    arithmetic: Arithmetic[F]
    parts: Sequence[F]

    def add_gram(self, total: Float32) -> None:
        """Add X'X of all parts X to the tiles of ``total`` [in, in] on and above the diagonal."""
        places = [place for place in product(_tiles(len(total)), repeat=2) if place[1].start >= place[0].start]
        # Those of the diagonal, of which one half is computed, come last and fill what the others leave.
        places.sort(key=lambda place: place[0] == place[1])
        run_all(self.pool, lambda place: self._add(total, self, *place, upper=place[0] == place[1]), places)

    def add_cross(self, total: Float32, right: Factors[F]) -> None:
        """Add X'Y of all parts X, and Y of ``right``, to ``total`` [in, out]."""
        places = list(product(_tiles(total.shape[0]), _tiles(total.shape[1])))
        run_all(self.pool, lambda place: self._add(total, right, *place), places)

    def _add(self, total: Float32, right: Factors[F], rows: slice, columns: slice, *, upper: bool = False) -> None:
        for one, other in zip(self.parts, right.parts, strict=True):
            self.arithmetic.add(total, one, other, rows, columns, upper=upper)


def _tiles(size: int) -> list[slice]:
    """Whole panels, but for the last."""
    return [slice(part.start * PANEL, min(part.stop * PANEL, size)) for part in tiles(-(-size // PANEL), 512 // PANEL)]
