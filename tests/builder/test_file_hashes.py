"""Files are hashed beside other work, which need not wait where it fails."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from builder.file_hashes import FileHashes


def test_hashes_are_those_of_the_content(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode() * 3_000_000)
    with FileHashes(paths) as hashes:
        found = hashes.result()
    assert found == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_file_that_cannot_be_read_is_told_to_who_asks(tmp_path: Path) -> None:
    with FileHashes([tmp_path / "missing"]) as hashes, pytest.raises(FileNotFoundError):
        hashes.result()


def test_an_error_ends_it_early(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # days of hashing, and nothing on the disk
    begin = time.monotonic()
    with pytest.raises(ValueError, match="refused"), FileHashes([large]):
        raise ValueError("refused")
    assert time.monotonic() - begin < 60
