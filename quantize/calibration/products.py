"""Products of tall matrices in tiles over the pool's threads, each of which computes with one.

A tile is always the same sum in the same order, whichever thread computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import product

import numpy as np
import numpy.typing as npt

from quantize.tiles import run_all, tiles

Float32 = npt.NDArray[np.float32]


def add_gram(total: Float32, parts: Sequence[Float32], pool: Executor) -> None:
    """Add X'X of all ``parts`` X [num_tokens, in] to the tiles of ``total`` [in, in] on and above the diagonal."""
    places = [(rows, columns) for rows, columns in product(tiles(len(total)), repeat=2) if columns.start >= rows.start]
    # Those of the diagonal, where NumPy computes one half only, come last and fill what the others leave.
    places.sort(key=lambda place: place[0] == place[1])
    run_all(pool, lambda place: _add_tile(total, parts, parts, *place), places)


def add_cross(total: Float32, left: Sequence[Float32], right: Sequence[Float32], pool: Executor) -> None:
    """Add Y'X of all ``left`` Y [num_tokens, out] and ``right`` X [num_tokens, in] to ``total`` [out, in]."""
    places = product(tiles(total.shape[0]), tiles(total.shape[1]))
    run_all(pool, lambda place: _add_tile(total, left, right, *place), places)


def _add_tile(total: Float32, left: Sequence[Float32], right: Sequence[Float32], rows: slice, columns: slice) -> None:
    tile = total[rows, columns]
    for one, other in zip(left, right, strict=True):
        tile += one[:, rows].T @ other[:, columns]
