from __future__ import annotations

import threading
import time

from triton_repo.backend.stream import Chunk, Stream


class RecordingSink:
    """Where a stream's responses go in tests: a list instead of Triton, with the cost of a round trip if asked."""

    def __init__(self, *, send_s: float = 0.0) -> None:
        self.chunks: list[Chunk] = []
        self.times: list[float] = []
        self.threads: set[int] = set()
        self.cancelled = False
        self.finished = threading.Event()
        self._send_s = send_s

    def send(self, chunk: Chunk) -> None:
        time.sleep(self._send_s)
        self.chunks.append(chunk)
        self.times.append(time.monotonic())
        self.threads.add(threading.get_ident())
        if chunk.is_final:
            self.finished.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def wait(self, timeout: float = 20.0) -> Chunk:
        """The last chunk, when it has come."""
        assert self.finished.wait(timeout), f"no last response; so far: {self.chunks}"
        return self.chunks[-1]


def open_stream(request_id: int, sink: RecordingSink, *, is_streaming: bool = True, prefix: str = "") -> Stream:
    return Stream(request_id, sink, is_streaming, prefix)
