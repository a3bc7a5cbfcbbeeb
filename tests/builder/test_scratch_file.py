"""Converted weights wait in a file whose pages can be given back, and which nobody has to remove."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.targets.tensorrt.memory import UnusedPages, file_map_of
from builder.targets.tensorrt.payload import float_payload
from builder.targets.tensorrt.scratch_file import ScratchFile
from plansmith_errors import BuildError


def payloads() -> list[Any]:
    rng = np.random.default_rng(0)
    return [float_payload(rng.normal(size=(rows, 1024)).astype(np.float32), "float16", "w") for rows in (700, 513, 1)]


def test_what_is_kept_is_the_same_and_lies_in_the_file(tmp_path: Path) -> None:
    scratch, given = ScratchFile(tmp_path), payloads()
    kept = [scratch.keep(payload) for payload in given]
    scratch.close()
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert [file_map_of(payload.array) is not None for payload in kept] == [True, True, False], "the last is small"
    assert scratch.keep(kept[0]) is kept[0]
    with UnusedPages(payload.array for payload in kept):
        for before, after in zip(given, kept, strict=True):
            assert (before.dtype, before.shape) == (after.dtype, after.shape)
            np.testing.assert_array_equal(before.array, after.array)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(BuildError, match="converted weights cannot be written: No space left on device"):
        ScratchFile(tmp_path).keep(payloads()[0])
