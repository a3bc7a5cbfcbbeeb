"""Converted weights wait in a file whose pages can be given back, and which nobody has to remove."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from builder.targets.tensorrt.memory import UnusedPages, file_map_of
from builder.targets.tensorrt.payload import Deferred, float_payload
from builder.targets.tensorrt.scratch_file import ScratchFile
from plansmith_errors import BuildError


def payloads() -> list[Any]:
    rng = np.random.default_rng(0)
    return [float_payload(rng.normal(size=(rows, 1024)).astype(np.float32), "float16", "w") for rows in (700, 513, 1)]


def test_what_is_kept_is_the_same_and_lies_in_the_file(tmp_path: Path) -> None:
    given = payloads()
    with ScratchFile(tmp_path) as scratch:
        kept = [scratch.keep(payload) for payload in given]
        assert scratch.keep(kept[0]) is kept[0]
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert [file_map_of(payload.array) is not None for payload in kept] == [True, True, False], "the last is small"
    with UnusedPages(payload.array for payload in kept):
        for before, after in zip(given, kept, strict=True):
            assert (before.dtype, before.shape) == (after.dtype, after.shape)
            np.testing.assert_array_equal(before.array, after.array)


@pytest.mark.parametrize("rows", [4, 5000])
def test_values_that_are_made_when_they_are_written_are_the_same_too(tmp_path: Path, rows: int) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (rows, 300), np.uint8)
    later = Deferred("int4", (rows, 600), packed, lambda: packed ^ np.uint8(0x88))
    with ScratchFile(tmp_path) as scratch:
        kept = scratch.keep(later)
    assert (kept.dtype, kept.shape, kept.nbytes) == ("int4", (rows, 600), packed.nbytes)
    assert kept.array is kept.array, "TensorRT refers to its memory"
    np.testing.assert_array_equal(kept.array.reshape(packed.shape), packed ^ 0x88)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("rows", [3, 1500])
def test_floats_are_cast_as_they_are_in_memory(tmp_path: Path, dtype: Any, stored: Any, rows: int) -> None:
    values = np.random.default_rng(0).normal(size=(rows, 800)).astype(stored)
    with ScratchFile(tmp_path) as scratch:
        found = scratch.cast(values, dtype, "w")
    expected = float_payload(values, dtype, "w")
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found.array, expected.array)


def test_a_value_that_does_not_fit_is_named_at_the_end(tmp_path: Path) -> None:
    values = np.ones((1500, 800), ml_dtypes.bfloat16)
    values[1499, 799] = 1e6
    with pytest.raises(BuildError, match="w has values beyond the range of float16"), ScratchFile(tmp_path) as scratch:
        scratch.cast(values, "float16", "w")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    message = "converted weights cannot be written: No space left on device"
    with pytest.raises(BuildError, match=message), ScratchFile(tmp_path) as scratch:
        scratch.keep(payloads()[0])
