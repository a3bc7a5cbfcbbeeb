"""Write safetensors files as a stream: space for the header is reserved, tensors follow, the header is written last."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.dtypes import SAFETENSORS_TAGS


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorSlot:
    """The place of one tensor in the file. Rows may be written by several threads, in any order."""

    def __init__(self, descriptor: int, spec: TensorSpec, begin: int, lock: threading.Lock) -> None:
        self.spec = spec
        self._lock = lock
        self._descriptor = descriptor
        self._begin = begin

    def write_rows(self, first_row: int, rows: npt.NDArray[Any]) -> None:
        """Rows of the first axis, from ``first_row`` on. Raises OSError (a full disk)."""
        row_bytes = prod(self.spec.shape[1:]) * self.spec.dtype.itemsize
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        offset = self._begin + first_row * row_bytes
        with self._lock:  # the kernel's own lock on the file would spin
            while data.size:
                written = os.pwrite(self._descriptor, data.data, offset)
                data, offset = data[written:], offset + written


class SafetensorsWriter:
    """One file. ``planned`` bounds the header: the same tensors, none of them smaller than what is added.

    ``metadata_format`` is the header's "format" key: readers of Hugging Face checkpoints expect "pt". ``begun`` are the
    tensors that a run before wrote into the file; what follows them in it is cut off.
    """

    def __init__(
        self,
        path: Path,
        planned: Sequence[TensorSpec],
        *,
        metadata_format: str = "plansmith",
        begun: Sequence[TensorSpec] = (),
    ) -> None:
        self.path = path
        self._format = metadata_format
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | (0 if begun else os.O_CREAT | os.O_EXCL), 0o644)
        total = sum(spec.nbytes for spec in planned)
        bound = len(_header([(spec, total, total) for spec in planned], self._format))
        self._header_bytes = -(-bound // 8) * 8
        self._placed: list[tuple[TensorSpec, int, int]] = []
        self._data_bytes = 0
        for spec in begun:
            self.add(spec)
        if begun:
            os.ftruncate(self._descriptor, self.end)

    @property
    def end(self) -> int:
        """Bytes of the file up to and with the last tensor."""
        return 8 + self._header_bytes + self._data_bytes

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of all tensors so far, in order."""
        return tuple(spec for spec, _, _ in self._placed)

    def sync(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError."""
        os.fdatasync(self._descriptor)

    def add(self, spec: TensorSpec) -> TensorSlot:
        """Append a tensor: its rows are then written through the slot."""
        begin = self._data_bytes
        self._data_bytes += spec.nbytes
        self._placed.append((spec, begin, self._data_bytes))
        return TensorSlot(self._descriptor, spec, 8 + self._header_bytes + begin, self._lock)

    def close(self) -> None:
        """Write the header, padded with spaces as the format allows. Without this call the file is not valid."""
        header = _header(self._placed, self._format).ljust(self._header_bytes)
        if len(header) > self._header_bytes:
            raise ValueError(f"{self.path}: tensors were added that were not planned: {self._placed[-1][0].name}")
        os.pwrite(self._descriptor, struct.pack("<Q", self._header_bytes) + header, 0)
        self.abort()

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self.abort()


def _header(placed: Sequence[tuple[TensorSpec, int, int]], metadata_format: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": metadata_format}}
    for spec, begin, end in placed:
        entries[spec.name] = {
            "dtype": SAFETENSORS_TAGS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    return json.dumps(entries, separators=(",", ":")).encode()
