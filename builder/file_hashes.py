"""SHA-256 of files, beside other work."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from builder.thread_priority import run_beside_others

_CHUNK = 1 << 20


def file_sha256(path: Path, stop: threading.Event | None = None) -> str:
    """In hexadecimal; of what was read by then where it is told to ``stop``. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while (chunk := file.read(_CHUNK)) and not (stop is not None and stop.is_set()):
            digest.update(chunk)
    return digest.hexdigest()


class FileHashes:
    """Hashes ``paths`` on a thread of its own, from its start to the end of this context at the latest."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._stop = threading.Event()
        self._found: Future[dict[str, str]] = Future()
        self._thread = threading.Thread(target=self._hash, name="file-hashes", daemon=True)

    def result(self) -> dict[str, str]:
        """By file name; waits for the last of them. Raises OSError."""
        return self._found.result()

    def __enter__(self) -> FileHashes:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()  # whoever wanted them has them
        self._thread.join()

    def _hash(self) -> None:
        run_beside_others()
        try:
            self._found.set_result({path.name: file_sha256(path, self._stop) for path in self._paths})
        except OSError as error:
            self._found.set_exception(error)
