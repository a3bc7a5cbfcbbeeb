"""The activations between two layers, in memory or, when they are many, in a file."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Executor, Future
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from quantize.calibration.file_io import read_all, write_all

Float32 = npt.NDArray[np.float32]


class HiddenStates:
    """float32 [num_windows, num_tokens, hidden_size]; each layer replaces them window by window.

    Above ``max_bytes`` they lie in a file, read and written by window: mapped pages would count as the process's own.
    The file has no name, so that the system frees it even after kill -9, unless ``keep`` is given: then every layer's
    inputs are a file ``NAME-LAYER`` in ``directory`` from which a later run can start, in memory or not. It has its
    name only when it is whole, and the one two layers before goes when the next is.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        max_bytes: float,
        directory: Path,
        *,
        keep: bool = False,
        name: str = "hidden",
        pool: Executor | None = None,
    ) -> None:
        self.shape = shape
        self.layer = 0  # whose inputs they are
        self._directory, self._name, self._keep, self._pool = directory, name, keep, pool
        self._array: Float32 | None = None
        self._current = self._next = -1
        self._sync: Future[None] | None = None
        if self.nbytes <= max_bytes:
            self._array = np.empty(shape, np.float32)
        else:
            with tempfile.TemporaryFile(dir=directory) as file:
                self._current = os.dup(file.fileno())

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * 4

    @property
    def on_disk(self) -> bool:
        return self._array is None

    def read(self, window: int) -> Float32:
        """[num_tokens, hidden_size]; to be read only."""
        values: Float32 = np.empty(self.shape[1:], np.float32) if self._array is None else self._array[window]
        if self._array is not None:
            return values
        read_all(self._current, values, window * values.nbytes)
        return values

    def write(self, window: int, values: Float32) -> None:
        """Of the layer that ``begin`` named. Raises OSError (a full disk)."""
        if self._array is not None:
            self._array[window] = values
        else:
            write_all(self._next if self._next >= 0 else self._current, values, window * values.nbytes)

    def begin(self, layer: int) -> None:
        """The inputs of ``layer`` follow, window by window."""
        self.layer = layer
        if not self._keep:
            return
        self._next = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def end(self) -> None:
        """All windows are written; what the layer before read goes."""
        if not self._keep:
            return
        self._wait()  # those of the layer before are on the disk; only then may the ones before them go
        for old in self._directory.glob(f"{self._name}-*"):
            if old != _path(self._directory, self._name, self.layer - 1):
                old.unlink()
        if self._array is not None:
            write_all(self._next, self._array, 0)
        self._unfinished.rename(_path(self._directory, self._name, self.layer))
        self._close(self._current)
        self._current, self._next = self._next, -1
        if self._pool is not None:
            self._sync = self._pool.submit(os.fsync, self._current)

    def restore(self, layer: int) -> None:
        """Take up the inputs of ``layer`` that a run before kept. Raises OSError."""
        self._close(self._current)
        self._current = os.open(_path(self._directory, self._name, layer), os.O_RDONLY)
        self.layer = layer
        if self._array is not None:
            read_all(self._current, self._array, 0)

    def _wait(self) -> None:
        if self._sync is not None:
            self._sync.result()
            self._sync = None

    @property
    def _unfinished(self) -> Path:
        return self._directory / f"{self._name}.unfinished"

    @staticmethod
    def _close(descriptor: int) -> None:
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._wait()
        elif self._sync is not None:
            self._sync.exception()  # the error on its way out says enough
        self._close(self._current)
        self._close(self._next)
        self._current = self._next = -1


def is_kept(directory: Path, layer: int, shape: tuple[int, int, int], name: str = "hidden") -> bool:
    """Whether a run can start at ``layer``."""
    path = _path(directory, name, layer)
    return path.is_file() and path.stat().st_size == int(np.prod(shape)) * 4


def _path(directory: Path, name: str, layer: int) -> Path:
    return directory / f"{name}-{layer}"
