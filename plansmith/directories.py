"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from plansmith_errors import ArtifactError


@contextmanager
def exclusive(lock_file: Path, holder: str) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when the process dies. Raises ArtifactError if it is taken."""
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock_file.touch()  # says why a place is not writable, which the lock would take for a holder
        lock = FileLock(lock_file)
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(f"{holder} is in use by another run; wait for it or choose another place") from None
    except OSError as error:
        raise ArtifactError(f"{holder}: cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield a new directory beside ``final`` and rename it there when the block succeeds.

    A run that is killed leaves only ``.NAME.partial``, which the next run removes, or, where the block keeps a
    directory ``resume_state(final)``, finds as it was left. The caller holds a lock. Raises ArtifactError when the disk
    refuses.
    """
    partial, state = final.parent / f".{final.name}.partial", resume_state(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if not state.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{partial}: cannot be written: {error.strerror or error}") from None
    try:
        yield partial
        _flush(partial)
        partial.rename(final)
        _flush_entry(final.parent)
        shutil.rmtree(state, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(f"{final}: cannot be written: {error.strerror or error}") from error
    finally:
        if not state.is_dir():
            shutil.rmtree(partial, ignore_errors=True)


def resume_state(final: Path) -> Path:
    """Beside ``final``: what a block that can be continued knows of its unfinished directory."""
    return final.parent / f".{final.name}.resume"


def remove_unfinished(folder: Path, *, keep: Path | None = None, names: str = "*") -> None:
    """Unfinished directories in ``folder`` and their state, those of ``keep`` excepted. The caller holds a lock."""
    for kind in ("resume", "partial"):  # in this order: a partial without its state is removed by whoever finds it
        for path in folder.glob(f".{names}.{kind}"):
            if keep is None or path.name != f".{keep.name}.{kind}":
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def output_directory(final: Path) -> Iterator[Path]:
    """``atomic_directory`` for a path that the user named: locked, and never over something that exists."""
    try:
        exists = final.exists()
    except OSError as error:
        raise ArtifactError(f"{final}: cannot be written: {error.strerror or error}") from None
    if exists:
        shutil.rmtree(resume_state(final), ignore_errors=True)  # of a run that was killed after it had finished
        raise ArtifactError(f"{final}: exists already; remove it or name another output")
    lock_file = final.parent / f".{final.name}.lock"
    with exclusive(lock_file, str(final)):
        try:
            with atomic_directory(final) as partial:
                yield partial
        finally:
            lock_file.unlink(missing_ok=True)


def directory_size(path: Path) -> int:
    """Bytes of all files below ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _flush(folder: Path) -> None:
    """Bring contents to the disk before the rename, so that a power cut cannot leave a whole name on half a file."""
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
