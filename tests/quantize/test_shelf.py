"""Activations of a layer stay in memory up to a limit, and none are lost beyond it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quantize.calibration.shelf import Shelf
from quantize.tiles import run_all, tiles


@pytest.mark.parametrize("max_bytes", [0, 100, 1e9])
def test_what_was_put_is_read_from_memory_or_file(tmp_path: Path, max_bytes: float) -> None:
    shelf = Shelf(max_bytes, tmp_path)
    arrays = [np.full((size, 3), size, np.float32) for size in (4, 1, 0, 7)]
    with ThreadPoolExecutor(3) as pool:
        shelved = list(pool.map(shelf.put, arrays))
    for array, kept in zip(arrays, shelved, strict=True):
        np.testing.assert_array_equal(kept.read(), array)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    shelf.close()


def test_room_is_used_again_when_nobody_refers_to_what_was_there(tmp_path: Path) -> None:
    shelf = Shelf(40, tmp_path)
    for _ in range(20):
        first, second = shelf.put(np.ones(10, np.float32)), shelf.put(np.ones(10, np.float32))
        assert first.values is not None and second.values is None and second.offset == 0
        del first, second
    shelf.close()


def test_tiles_cover_everything_once_and_errors_are_raised() -> None:
    for size in (1, 2, 511, 513, 1536):
        covered = np.concatenate([np.arange(part.start, part.stop) for part in tiles(size)])
        np.testing.assert_array_equal(covered, np.arange(size))
        assert len(tiles(size)) >= min(size, 2)
    with ThreadPoolExecutor(2) as pool, pytest.raises(ZeroDivisionError):
        run_all(pool, lambda place: 1 / (place.start - place.start), tiles(4))
