"""What other threads ask of the step thread: new requests, cancellations, the end."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from plansmith_errors import EngineError, RequestError
from plugins.inflight_batching.sequence import Sequence


@dataclass(frozen=True)
class Cancel:
    request_id: str


class Inbox:
    """The only state that threads share. Its lock is held for a few list operations, never during a step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Sequence | Cancel] = []
        self._open_ids: set[str] = set()
        self._closed: str | None = None  # why

    def submit(self, sequence: Sequence) -> None:
        """Raises RequestError when a request of this id is still open, EngineError after ``close``."""
        with self._changed:
            if self._closed is not None:
                raise EngineError(self._closed)
            if sequence.request_id in self._open_ids:
                raise RequestError(f"request id {sequence.request_id!r} is in use: expected one that is not")
            self._open_ids.add(sequence.request_id)
            self._messages.append(sequence)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open_ids:
                self._messages.append(Cancel(request_id))
                self._changed.notify()

    def close(self, reason: str) -> None:
        """Refuse what comes from now on, with ``reason``; the first reason stays."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def take(self, *, wait: bool) -> tuple[list[Sequence | Cancel], bool]:
        """All messages in order, and whether the inbox is closed; ``wait`` sleeps until there is either."""
        with self._changed:
            while wait and not self._messages and self._closed is None:
                self._changed.wait()
            messages, self._messages = self._messages, []
            return messages, self._closed is not None

    def forget(self, request_ids: list[str]) -> None:
        """These requests have ended; their ids may be used again."""
        with self._changed:
            self._open_ids.difference_update(request_ids)

    @property
    def num_submitted(self) -> int:
        """Requests that the step thread has not seen yet."""
        with self._changed:
            return sum(isinstance(message, Sequence) for message in self._messages)
