"""What a run has finished, one JSON line each, so that a killed one goes on where it was.

{"run": ...}                      first line: what the result depends on
{"boot": ...}                     a run begins; the system's boot id
{"tensor": {...}}                 written to the file of weights, with all that config.json says of it
{"synced": N}                     the first N tensors are on the disk itself

After kill -9 the system still holds every write, so each line counts. After a power cut, which a new boot id tells,
only what was synced does. A torn last line is no line.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quantize.activations import Activations
from quantize.dtypes import NUMPY_DTYPES, SAFETENSORS_TAGS
from quantize.report import TensorReport
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

SYNC_BYTES = 256 * 2**20  # of weights between two syncs: seconds of work at most, and no thousands of waits
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class FinishedTensor:
    report: TensorReport
    file: str
    specs: tuple[TensorSpec, ...]
    end: int  # bytes of ``file`` up to and with this tensor

    def to_json(self) -> dict[str, Any]:
        specs = [[spec.name, SAFETENSORS_TAGS[spec.dtype], list(spec.shape)] for spec in self.specs]
        return {"report": asdict(self.report), "file": self.file, "specs": specs, "end": self.end}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FinishedTensor:
        fields = value["report"]
        activations = None if fields["activations"] is None else Activations(**fields["activations"])
        report = TensorReport(**{**fields, "shape": tuple(fields["shape"]), "activations": activations})
        specs = tuple(TensorSpec(name, NUMPY_DTYPES[tag], tuple(shape)) for name, tag, shape in value["specs"])
        return cls(report, value["file"], specs, value["end"])


@dataclass(frozen=True)
class JournalContent:
    run: dict[str, Any]
    finished: tuple[FinishedTensor, ...]
    num_bytes: int  # of the lines that count


def read_journal(path: Path) -> JournalContent | None:
    """None when there is no journal, or none whose first line is whole."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    lines: list[dict[str, Any]] = []
    ends = [0]
    for line in data.splitlines(keepends=True):
        value = _parse(line)
        if value is None:
            break  # torn: nothing after it can be relied on
        lines.append(value)
        ends.append(ends[-1] + len(line))
    if not lines or "run" not in lines[0]:
        return None
    num_lines = _num_that_count(lines)
    finished = tuple(value["tensor"] for value in lines[:num_lines] if "tensor" in value)
    return JournalContent(lines[0]["run"], finished, ends[num_lines])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(value, dict) and "tensor" in value:
            value["tensor"] = FinishedTensor.from_json(value["tensor"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return value if isinstance(value, dict) else None


def _num_that_count(lines: Sequence[dict[str, Any]]) -> int:
    boots = [value["boot"] for value in lines if "boot" in value]
    if boots[-1:] == [boot_id()]:
        return len(lines)
    num_synced = max((value["synced"] for value in lines if "synced" in value), default=0)
    places = [number for number, value in enumerate(lines, 1) if "tensor" in value]
    return places[num_synced - 1] if num_synced else 1


def boot_id() -> str:
    """Differs from every other one where the system does not tell: then only what was synced counts."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


class Journal:
    """Open for appending. All methods raise OSError (a full disk). One thread uses it."""

    def __init__(self, path: Path, run: dict[str, Any], content: JournalContent | None, pool: Executor) -> None:
        self.finished = content.finished if content is not None else ()
        self._pool = pool
        self._num_tensors = self._num_syncing = self._num_synced = 0
        self._sync: Future[None] | None = None
        self._unsynced = 0
        self._writer: SafetensorsWriter | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._descriptor, content.num_bytes if content is not None else 0)
        if content is None:
            self._append({"run": run})
        self._append({"boot": boot_id()})

    def restored(self, num_tensors: int, writer: SafetensorsWriter) -> None:
        """That many more were in the file of ``writer``, synced or not."""
        self._num_tensors += num_tensors
        self._writer = writer

    def record(self, tensor: FinishedTensor, writer: SafetensorsWriter) -> None:
        """The tensor is whole in the file of ``writer``."""
        self._append({"tensor": tensor.to_json()})
        self._writer = writer
        self._num_tensors += 1
        self._unsynced += tensor.report.bytes_out
        if self._unsynced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            self.begin_sync()

    def begin_sync(self) -> None:
        """Bring what was recorded to the disk, beside the work that follows."""
        self._end_sync()
        if self._writer is not None and self._num_synced < self._num_tensors:
            self._num_syncing, self._unsynced = self._num_tensors, 0
            self._sync = self._pool.submit(self._writer.sync)

    def settle(self) -> None:
        """Wait until all that was recorded is on the disk. To be called before a writer is closed."""
        self._end_sync()
        self.begin_sync()
        self._end_sync()

    def _end_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()
            self._sync = None
            self._num_synced = self._num_syncing
            self._append({"synced": self._num_synced})

    def _append(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sync is not None:
            self._sync.exception()  # it uses a file that is about to be closed; an error is on its way out already
        os.close(self._descriptor)
