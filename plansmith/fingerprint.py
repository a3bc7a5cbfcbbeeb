"""BLAKE3 fingerprints of what a stage depends on: file contents, settings, our own code, library versions."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from plansmith_errors import ArtifactError, CheckpointError


def fingerprint(value: Any) -> str:
    """BLAKE3 of a JSON-serialisable value, 32 hex digits: 128 bits, ample for a build store."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return blake3(canonical.encode()).hexdigest(length=16)


@functools.cache
def code_fingerprint(*packages: str) -> str:
    """BLAKE3 of the source files of our packages, so that a changed algorithm never reuses an old result."""
    digest = blake3()
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ArtifactError(f"package {package!r} is not installed; install plansmith again")
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")) + sorted(root.rglob("*.yaml")):
            digest.update(f"{package}/{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest(length=16)


def library_versions(*names: str) -> dict[str, str]:
    """Installed versions; a library that is absent is recorded as such, and its stage will say what it needs."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def file_stamp(path: Path) -> str:
    """Changes whenever the file is written; cheaper than its content. Raises OSError."""
    status = path.stat()
    return f"{path.resolve()}|{status.st_ino}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"


class FileHashes:
    """Content hashes, remembered by inode, size and change times so that an unchanged 100 GB is not read again."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] = _read_memory(memory)
        self._changed = False

    def hash(self, path: Path) -> str:
        """BLAKE3 of one file's content."""
        try:
            stamp = file_stamp(path)
            if stamp not in self._known:
                self._known[stamp] = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest(length=16)
                self._changed = True
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        return self._known[stamp]

    def hash_all(self, paths: Iterable[Path]) -> dict[str, str]:
        return {path.name: self.hash(path) for path in paths}

    def save(self) -> None:
        """Remember for the next run; a crash in between costs only the time to hash again."""
        if self._changed:
            fresh = self._memory.with_suffix(".new")
            fresh.write_text(json.dumps(self._known))
            fresh.rename(self._memory)


def _read_memory(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # only a cache: without it the files are hashed again
    return known if isinstance(known, dict) else {}
