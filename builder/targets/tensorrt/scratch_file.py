"""Weights in another type than the checkpoint's, in a file of their own until the plan is built.

Mapped from there, their pages can be given back like those of the checkpoint; in memory they would be held beside the
builder's own copy.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.memory import file_map_of
from builder.targets.tensorrt.payload import Payload
from plansmith_errors import BuildError

_LARGE = 1 << 20  # bytes of a payload that is worth a mapping


class ScratchFile:
    """In ``directory``, without a name, so that the system frees it even after kill -9."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1
        self._end = 0

    def keep(self, payload: Payload) -> Payload:
        """The same, mapped from the file unless it is small or mapped already. Raises BuildError for a full disk."""
        if payload.nbytes < _LARGE or file_map_of(payload.array) is not None:
            return payload
        try:
            mapped = self._write(np.ascontiguousarray(payload.array).reshape(-1).view(np.uint8))
        except OSError as error:
            raise BuildError(
                f"{self._directory}: converted weights cannot be written: {error.strerror}; is there room on the disk?"
            ) from None
        array = np.frombuffer(mapped, payload.array.dtype, payload.array.size)
        return replace(payload, array=array.reshape(payload.array.shape))

    def close(self) -> None:
        """What was kept stays readable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, values: npt.NDArray[np.uint8]) -> mmap.mmap:
        if self._descriptor < 0:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                self._descriptor = os.dup(file.fileno())
        start, written, view = self._end, 0, values.data
        while written < len(view):
            written += os.pwrite(self._descriptor, view[written:], start + written)
        self._end = -(-(start + written) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return mmap.mmap(self._descriptor, written, access=mmap.ACCESS_READ, offset=start)
