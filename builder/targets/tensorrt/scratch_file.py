"""Weights in another form than the checkpoint's, in a file of their own until the plan is built.

Mapped from there, their pages can be given back like those of the checkpoint; in memory they would be held beside the
builder's own copy. Other threads write them, while the network goes on.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.memory import file_map_of, release_pages
from builder.targets.tensorrt.options import NetworkDtype
from builder.targets.tensorrt.payload import Deferred, Payload, float_payload, numpy_type
from plansmith_errors import BuildError

_LARGE = 1 << 20  # bytes of a payload that is worth a mapping
_PART = 1 << 18  # values at a time: malloc then has room for them from the part before
_THREADS = 2
_DTYPES: dict[NetworkDtype, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class ScratchFile:
    """In ``directory``, without a name, so that the system frees it even after kill -9. What was kept stays readable.

    The end of this context waits until all is written, and raises BuildError for a full disk or a value that does not
    fit.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1
        self._end = 0
        self._pool = ThreadPoolExecutor(_THREADS)
        self._writing: list[Future[None]] = []

    def keep(self, payload: Payload) -> Payload:
        """The same, mapped from the file unless it is small or mapped already."""
        if payload.nbytes < _LARGE:
            return payload.now()
        if isinstance(payload, Deferred):
            mapped = self._store(payload.nbytes, lambda: _parts_of(payload))
            return Payload(payload.dtype, payload.shape, np.frombuffer(mapped, numpy_type(payload.dtype)))
        if file_map_of(payload.array) is not None:
            return payload
        flat = np.ascontiguousarray(payload.array).reshape(-1)
        mapped = self._store(payload.nbytes, lambda: _parts(flat))
        array = np.frombuffer(mapped, flat.dtype, flat.size).reshape(payload.array.shape)
        return Payload(payload.dtype, payload.shape, array)

    def cast(self, values: npt.NDArray[Any], dtype: NetworkDtype, name: str) -> Payload:
        """As ``float_payload``."""
        stored = _DTYPES[dtype]
        nbytes = values.size * np.dtype(stored).itemsize
        if values.dtype.name == dtype or nbytes < _LARGE:
            return float_payload(values, dtype, name)
        flat = np.ascontiguousarray(values).reshape(-1)
        mapped = self._store(nbytes, lambda: (float_payload(part, dtype, name).array for part in _parts(flat)))
        return Payload(dtype, values.shape, np.frombuffer(mapped, stored, values.size).reshape(values.shape))

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if kind is None:
            for written in self._writing:
                written.result()

    def _store(self, nbytes: int, parts: Callable[[], Iterable[npt.NDArray[Any]]]) -> mmap.mmap:
        """A mapping of as many bytes, which are all there at the end."""
        if self._descriptor < 0:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                self._descriptor = os.dup(file.fileno())
        start, end = self._end, self._end + nbytes
        os.ftruncate(self._descriptor, end)
        self._end = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._writing.append(self._pool.submit(self._write, start, parts))
        return mmap.mmap(self._descriptor, nbytes, access=mmap.ACCESS_READ, offset=start)

    def _write(self, place: int, parts: Callable[[], Iterable[npt.NDArray[Any]]]) -> None:
        try:
            for part in parts():
                view = part.view(np.uint8).data
                while view:
                    written = os.pwrite(self._descriptor, view, place)
                    place, view = place + written, view[written:]
        except OSError as error:
            raise BuildError(
                f"{self._directory}: converted weights cannot be written: {error.strerror}; is there room on the disk?"
            ) from None


def _parts_of(payload: Deferred) -> Iterator[npt.NDArray[Any]]:
    yield np.ascontiguousarray(payload.array)
    release_pages(payload.source)


def _parts(flat: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """At the end, pages of the file that they were read from, if any, are given back."""
    for begin in range(0, flat.size, _PART):
        yield flat[begin : begin + _PART]
    release_pages(flat)
