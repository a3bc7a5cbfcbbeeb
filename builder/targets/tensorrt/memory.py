"""Memory of a process that builds a plan: nearly all of it is weights, which the builder copies."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

_INTERVAL_S = 0.5
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ONE_MIB = -3, -1, 1 << 20  # glibc's malloc.h


def return_freed_memory() -> None:
    """Let glibc give freed blocks from 1 MiB on back to the system. By default it keeps more and more of the builder's:
    a sixth of the peak of an int4 plan. Elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _ONE_MIB)
        mallopt(_TRIM_THRESHOLD, _ONE_MIB)


class UnusedPages:
    """Within this context, pages of the mapped files that ``arrays`` are views of are given back again and again.

    They count as the process's own as soon as they were read, and what the builder has copied it does not read again.
    Views stay valid: a page that is read once more comes from the file.
    """

    def __init__(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        self._maps = {id(found): found for array in arrays if (found := file_map_of(array)) is not None}
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._release, name="unused-pages", daemon=True)

    def __enter__(self) -> UnusedPages:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()

    def _release(self) -> None:
        while True:
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            if self._is_done.wait(_INTERVAL_S):
                return


def release_pages(array: npt.NDArray[Any]) -> None:
    """Give back those of a mapped file that ``array``, whose values are contiguous, lies in; of other memory none."""
    mapped = file_map_of(array)
    if mapped is None or not array.size:
        return
    offset = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, begin, offset + array.nbytes - begin)


def file_map_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """The read-only file map below a view, or None: of other memory, discarding pages would lose what is in them."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base if base is not None and memoryview(base).readonly else None
