"""The artifact store: each stage's output is one immutable directory named by all that it depends on.

STORE/lock                 one run at a time
STORE/file-hashes.json     a cache of content hashes
STORE/STAGE-KEY/           an artifact: the stage's files and artifact.json, which is written last
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plansmith.directories import atomic_directory, exclusive, remove_unfinished, resume_state
from plansmith.fingerprint import FileHashes, fingerprint
from plansmith_errors import ArtifactError

RECORD = "artifact.json"


@dataclass(frozen=True)
class Artifact:
    """A finished stage. ``payload`` is the directory that the stage wrote."""

    stage: str
    key: str
    path: Path
    seconds: float  # what making it took, also when it is reused
    num_bytes: int
    reused: bool

    @property
    def payload(self) -> Path:
        return self.path / "payload"


@dataclass(frozen=True)
class _Record:
    stage: str
    key: str
    depends_on: dict[str, Any]
    seconds: float
    files: dict[str, int]


class ArtifactStore:
    """Opened by ``open_store``, which holds the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file_hashes = FileHashes(root / "file-hashes.json")

    def key(self, depends_on: dict[str, Any]) -> str:
        return fingerprint(depends_on)

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact if it is there and whole: every file present at the size that was recorded."""
        path = self.root / f"{stage}-{key}"
        record = _read_record(path)
        if record is None:
            return None
        return Artifact(stage, key, path, record.seconds, sum(record.files.values()), reused=True)

    def find_alike(self, stage: str, depends_on: dict[str, Any], *, but_for: str) -> Artifact | None:
        """A whole artifact of the same dependencies, whatever it has for the one named ``but_for``."""
        wanted = self.key({**depends_on, but_for: None})
        for path in sorted(self.root.glob(f"{stage}-*")):
            record = _read_record(path)
            if record is not None and self.key({**record.depends_on, but_for: None}) == wanted:
                return Artifact(stage, record.key, path, record.seconds, sum(record.files.values()), reused=True)
        return None

    def resume_state(self, stage: str, depends_on: dict[str, Any]) -> Path:
        """The directory that a stage which can be continued keeps beside its unfinished payload."""
        return resume_state(self.root / f"{stage}-{self.key(depends_on)}")

    def make(self, stage: str, depends_on: dict[str, Any], produce: Callable[[Path], object]) -> Artifact:
        """Reuse the artifact of these dependencies or have ``produce`` write its payload into a new directory.

        The payload of a run that was killed is found as it was left where the stage keeps ``resume_state``; that of
        other dependencies of the same stage is removed then.
        """
        key = self.key(depends_on)
        found = self.find(stage, key)
        if found is not None:
            return found
        final = self.root / f"{stage}-{key}"
        shutil.rmtree(final, ignore_errors=True)  # damaged: find() did not accept it
        remove_unfinished(self.root, keep=final, names=f"{stage}-*")
        started = time.monotonic()
        with atomic_directory(final) as partial:
            payload = partial / "payload"
            payload.mkdir(exist_ok=True)
            produce(payload)
            files = _file_sizes(payload)
            record = _Record(stage, key, depends_on, round(time.monotonic() - started, 3), files)
            (partial / RECORD).write_text(json.dumps(asdict(record), indent=2, default=str))
        return Artifact(stage, key, final, record.seconds, sum(files.values()), reused=False)


@contextmanager
def open_store(root: Path) -> Iterator[ArtifactStore]:
    """Open a store for one run. Raises ArtifactError when another run holds it."""
    with exclusive(root / "lock", f"artifact store {root}"):
        store = ArtifactStore(root)
        for partial in root.glob(".*.partial"):
            if not partial.with_suffix(".resume").is_dir():
                shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed; we hold the lock
        for state in root.glob(".*.resume"):
            if not state.with_suffix(".partial").is_dir():
                shutil.rmtree(state, ignore_errors=True)  # killed after its artifact had its name
        try:
            yield store
        finally:
            store.file_hashes.save()


def _file_sizes(payload: Path) -> dict[str, int]:
    # A repository that is served gains the byte code of its model.py; Triton's stub cannot be told to leave it.
    files = [path for path in sorted(payload.rglob("*")) if path.is_file() and path.parent.name != "__pycache__"]
    sizes = {str(path.relative_to(payload)): path.stat().st_size for path in files}
    if not sizes:
        raise ArtifactError(f"{payload}: the stage wrote nothing")
    return sizes


def _read_record(path: Path) -> _Record | None:
    try:
        record = _Record(**json.loads((path / RECORD).read_text()))
        whole = _file_sizes(path / "payload") == record.files
    except (OSError, ValueError, TypeError, ArtifactError):
        return None
    return record if whole else None
