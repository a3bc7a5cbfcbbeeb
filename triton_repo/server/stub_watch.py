"""Notices that the Python backend's stub has died.

Triton itself does not: it goes on saying that the model is ready, open streams hang, and every new request fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from triton_repo.server.locate import STUB

_PROC = Path("/proc")
_COMM_LENGTH = 15  # the kernel cuts process names


class StubWatch:
    """``is_dead`` is asked again and again; it needs two looks in a row, as a model may just be reloading."""

    def __init__(self, server_pid: int, is_model_ready: Callable[[], bool]) -> None:
        self._server_pid = server_pid
        self._is_model_ready = is_model_ready
        self._missed = 0

    def is_dead(self) -> bool:
        """Whether the server says that its model is ready while it has no living stub."""
        if any(_is_stub(pid) for pid in _children(self._server_pid)) or not self._is_model_ready():
            self._missed = 0
        else:
            self._missed += 1
        return self._missed >= 2


def _children(pid: int) -> Iterator[int]:
    """Child processes, whichever thread of the process started them."""
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:
            continue  # that thread has just ended


def _is_stub(pid: int) -> bool:
    try:
        status = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    name, _, rest = status.partition("(")[2].rpartition(")")
    return name == STUB[:_COMM_LENGTH] and rest.split()[0] not in ("Z", "X")
