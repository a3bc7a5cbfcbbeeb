"""One GGUF file (version 2 or 3, little endian): metadata and tensor directory, checked against the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` package's own reader builds an array per
string (seconds for a large vocabulary) and trusts every length; this one checks each against the file before use.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import GGUF_MAGIC

Value = TypeVar("Value")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    type_name: str  # "Q4_1"
    type_id: int
    shape: tuple[int, ...]  # as in NumPy: rows first
    row_bytes: int  # of the last axis
    offset: int  # in the file
    nbytes: int


class GgufFile:
    """Raises CheckpointError when the file is truncated, tampered with or of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                if magic != GGUF_MAGIC:
                    raise CheckpointError(f"{path}: begins with {magic!r}, a GGUF file begins with {GGUF_MAGIC!r}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        cursor = _Cursor(path, self._map)
        self.metadata, self.tensors = _read_header(cursor)

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes [rows, row_bytes], a view of the map; a vector is one row."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(-1, tensor.row_bytes) if tensor.row_bytes else flat.reshape(0, 0)

    def require(self, key: str, kind: type[Value]) -> Value:
        """A metadata value that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def get(self, key: str, kind: type[Value]) -> Value | None:
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.path}: metadata key {key!r} is {type(value).__name__}, expected {kind.__name__}"
            )
        return value


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        self.position = 4

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise self.truncated(end)
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def truncated(self, expected: int) -> CheckpointError:
        return CheckpointError(f"{self.path}: truncated: expected at least {expected} bytes, found {len(self._data)}")

    def check_room(self, count: int, size: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is allocated for it."""
        if count * size > len(self._data) - self.position:
            raise self.truncated(self.position + count * size)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.number("Q")
        begin = self.position
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: the string at byte {begin} is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.string()
        return self.number(self._scalar_code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self.check_room(count, 8)
            return [self.string() for _ in range(count)]
        code = self._scalar_code(kind)
        self.check_room(count, struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def _scalar_code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self.path}: value type {kind} before byte {self.position} is none of GGUF's; the file is damaged"
            )
        return _SCALARS[kind]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    version = cursor.number("I")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path}: GGUF version {version}, expected 2 or 3 in little endian")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    cursor.check_room(num_values, 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key!r} occurs twice")
        metadata[key] = cursor.value()
    cursor.check_room(num_tensors, 24)
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}, expected a power of two")
    data_begin = -(-cursor.position // alignment) * alignment
    return metadata, _place_tensors(cursor, entries, data_begin)


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, ggml type and offset of a tensor."""
    name, num_dims = cursor.string(), cursor.number("I")
    if num_dims > _MAX_DIMS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS} are allowed"
        )
    shape = tuple(cursor.number("Q") for _ in range(num_dims))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _place_tensors(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], data_begin: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name!r} occurs twice")
        type_name, block, block_bytes = _block_layout(cursor.path, name, type_id)
        row = shape[-1] if shape else 1
        if row % block:
            raise CheckpointError(
                f"{cursor.path}: rows of tensor {name!r} have {row} values, not a multiple of {type_name}'s {block}"
            )
        row_bytes = row // block * block_bytes
        tensors[name] = GgufTensor(
            type_name, type_id, shape, row_bytes, data_begin + offset, prod(shape[:-1]) * row_bytes
        )
        end = data_begin + offset + tensors[name].nbytes
        if end > len(cursor._data):
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {name!r} ends at byte {end}, the file at {len(cursor._data)}"
            )
    return tensors


def _block_layout(path: Path, name: str, type_id: int) -> tuple[str, int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        ggml_type = GGMLQuantizationType(type_id)
    except ValueError:
        raise CheckpointError(f"{path}: tensor {name!r} has ggml type {type_id}, which is unknown") from None
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    return ggml_type.name, block, block_bytes
