"""One safetensors file, mapped into memory after its header has been checked against the file.

Format: u64 header length, JSON header, tensor bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import parse_json_object
from quantize.dtypes import NUMPY_DTYPES

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class StoredTensor:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # offsets in the data section, in bytes
    end: int


class SafetensorsFile:
    """Raises CheckpointError when the header and the file do not agree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.tensors, self._data_begin = _read_header(path, file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None

    def view(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of the mapped file; it keeps the map alive."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, tensor.dtype, prod(tensor.shape), self._data_begin + tensor.begin)
        return flat.reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Give back the pages of a tensor, which would count as the process's own; views stay valid."""
        tensor = self.tensors[name]
        begin = (self._data_begin + tensor.begin) // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._data_begin + tensor.end - begin
        if length:
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, StoredTensor], int]:
    file_bytes = path.stat().st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: truncated: a safetensors file has at least 8 bytes, found {len(prefix)}")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > MAX_HEADER_BYTES or header_bytes > file_bytes - 8:
        raise CheckpointError(
            f"{path}: its header is said to have {header_bytes} bytes, but {file_bytes - 8} bytes follow "
            f"(and {MAX_HEADER_BYTES} are allowed); the file is truncated or no safetensors file"
        )
    header = parse_json_object(file.read(header_bytes), f"{path}: header")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(f"{path}: tensor {name!r}", entry) for name, entry in header.items()}
    _check_layout(path, tensors, file_bytes - 8 - header_bytes)
    return tensors, 8 + header_bytes


def _parse_entry(source: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{source}: expected dtype, shape and data_offsets, found {_shorten(entry)}")
    dtype = NUMPY_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{source}: dtype {_shorten(entry['dtype'])} is not one of {', '.join(NUMPY_DTYPES)}")
    shape = _sizes(source, "shape", entry["shape"])
    offsets = _sizes(source, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise CheckpointError(f"{source}: data_offsets {list(offsets)} are not a begin and an end")
    expected = prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{source}: {entry['dtype']} {list(shape)} takes {expected} bytes, "
            f"data_offsets {list(offsets)} give it {offsets[1] - offsets[0]}"
        )
    return StoredTensor(dtype, shape, offsets[0], offsets[1])


def _sizes(source: str, key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise CheckpointError(f"{source}: {key} is {_shorten(value)}, expected a list of sizes")
    return tuple(value)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    """Tensors must cover the data section without holes or overlaps, as the format demands."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            problem = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {tensor.begin}, expected {position}: {problem}"
            )
        position = tensor.end
    if position != data_bytes:
        kind = "truncated" if position > data_bytes else "longer than its header says"
        raise CheckpointError(f"{path}: {kind}: expected {position} bytes of tensors, found {data_bytes}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
