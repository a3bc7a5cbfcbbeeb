"""Activations within one layer: in memory while they are few, the rest in a file."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantize.calibration.file_io import read_all, write_all

Float32 = npt.NDArray[np.float32]


class Shelf:
    """Holds arrays until nobody refers to what ``put`` returned. At most ``max_bytes`` of them are in memory.

    The file, in ``directory``, has no name, so that the system frees it even after kill -9. Any thread may call.
    """

    def __init__(self, max_bytes: float, directory: Path) -> None:
        self._max_bytes, self._directory = max_bytes, directory
        self._lock = threading.Lock()
        self._in_memory = self._end = self._num_on_disk = 0
        self._descriptor = -1

    def put(self, values: Float32) -> Shelved:
        """``values`` must not change any more. Raises OSError (a full disk)."""
        with self._lock:
            if self._in_memory + values.nbytes <= self._max_bytes:
                self._in_memory += values.nbytes
                return Shelved(self, values, -1, values.shape)
            descriptor, offset = self._file(), self._end
            self._end += values.nbytes
            self._num_on_disk += 1
        write_all(descriptor, values, offset)
        return Shelved(self, None, offset, values.shape)

    def read(self, offset: int, values: Float32) -> None:
        """Fill ``values`` from the file. Raises OSError."""
        read_all(self._descriptor, values, offset)

    def forget(self, shelved: Shelved) -> None:
        """Called when the last reference is gone."""
        with self._lock:
            if shelved.values is not None:
                self._in_memory -= shelved.values.nbytes
                return
            self._num_on_disk -= 1
            if self._num_on_disk == 0:
                self._end = 0  # what was written lies there no more

    def close(self) -> None:
        """Free the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _file(self) -> int:
        if self._descriptor < 0:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                self._descriptor = os.dup(file.fileno())
        return self._descriptor


@dataclass(eq=False)
class Shelved:
    """One array on a shelf."""

    shelf: Shelf
    values: Float32 | None  # None: in the file
    offset: int
    shape: tuple[int, ...]

    def read(self) -> Float32:
        """To be read only. Raises OSError."""
        if self.values is not None:
            return self.values
        values = np.empty(self.shape, np.float32)
        self.shelf.read(self.offset, values)
        return values

    def __del__(self) -> None:
        self.shelf.forget(self)
