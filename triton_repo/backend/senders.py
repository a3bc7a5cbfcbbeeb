"""The threads that talk to Triton. Sending blocks for a round trip, so no other thread ever does it.

A stream belongs to one sender for its whole life: with two, the end of a stream could overtake its last text.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count

from triton_repo.backend.pacing import Pacing
from triton_repo.backend.protocol import Delta
from triton_repo.backend.stream import Stream

logger = logging.getLogger(__name__)

OnCancelled = Callable[[int], None]
"""Told the request id of a stream whose client has gone."""


class Sender:
    """One thread and the streams it owns."""

    def __init__(self, pacing: Pacing, on_cancelled: OnCancelled, num_streams: Callable[[], int]) -> None:
        self._pacing = pacing
        self._on_cancelled = on_cancelled
        self._num_streams = num_streams
        self._wake = threading.Condition()
        self._wake_at = 0.0
        self._planned: list[tuple[float, int, Stream]] = []  # heap by due time
        self._order = count()
        self._closing = False
        self.num_owned = 0
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def push(self, additions: Iterable[tuple[Stream, Delta]]) -> None:
        """Hand over one step's additions; wakes the thread at most once."""
        now = time.monotonic()
        with self._wake:
            for stream, delta in additions:
                stream.add(delta)
                self._plan(stream, now)
            self._wake_if_due()

    def fail(self, failures: Iterable[tuple[Stream, str]]) -> None:
        now = time.monotonic()
        with self._wake:
            for stream, error in failures:
                stream.fail(error)
                self._plan(stream, now)
            self._wake_if_due()

    def poll_cancelled(self, stream: Stream) -> None:
        """Look now whether the client of a stream has gone (streams that send look by themselves)."""
        if not stream.cancel_requested and stream.sink.is_cancelled():
            stream.cancel_requested = True
            self._on_cancelled(stream.request_id)

    def close(self, timeout: float) -> None:
        """Send what is left, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def _plan(self, stream: Stream, now: float) -> None:
        if not stream.has_output:
            return
        due = self._pacing.due(now, stream.last_sent, self._num_streams(), is_final=stream.is_finished)
        if stream.due is None or due < stream.due:
            stream.due = due
            heapq.heappush(self._planned, (due, next(self._order), stream))

    def _wake_if_due(self) -> None:
        if self._planned and self._planned[0][0] < self._wake_at:
            self._wake.notify()

    def _run(self) -> None:
        while (batch := self._wait()) is not None:
            for stream in batch:
                self._send(stream)

    def _wait(self) -> list[Stream] | None:
        """Streams that are due now, or None when closed and drained."""
        with self._wake:
            while True:
                now = time.monotonic()
                batch = self._pop_due(now)
                if batch:
                    self._wake_at = 0.0  # awake: nobody needs to notify
                    return batch
                if self._closing and not self._planned:
                    return None
                self._wake_at = self._planned[0][0] if self._planned else float("inf")
                self._wake.wait(self._wake_at - now if self._planned else None)

    def _pop_due(self, now: float) -> list[Stream]:
        batch = []
        while self._planned and self._planned[0][0] <= now:
            due, _, stream = heapq.heappop(self._planned)
            if stream.due == due:  # otherwise an older plan, replaced by an earlier one
                stream.due = None
                batch.append(stream)
        return batch

    def _send(self, stream: Stream) -> None:
        now = time.monotonic()
        with self._wake:
            chunk = stream.take()
            stream.last_sent = now
        try:
            stream.sink.send(chunk)
            if not chunk.is_final and now - stream.last_cancel_check > self._pacing.cancel_interval(
                self._num_streams()
            ):
                stream.last_cancel_check = now
                self.poll_cancelled(stream)
        except Exception:  # the server refused the response: the request is lost, the other streams are not
            logger.exception("request %d: a response could not be sent", stream.request_id)
            stream.cancel_requested = True
            self._on_cancelled(stream.request_id)


class SenderPool:
    """Spreads streams over senders."""

    def __init__(self, pacing: Pacing, on_cancelled: OnCancelled, num_senders: int = 2) -> None:
        self._senders = [Sender(pacing, on_cancelled, self.__len__) for _ in range(num_senders)]
        self._owners: dict[int, Sender] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._owners)

    def open(self, stream: Stream) -> None:
        with self._lock:
            sender = min(self._senders, key=lambda candidate: candidate.num_owned)
            sender.num_owned += 1
            self._owners[stream.request_id] = sender

    def push(self, additions: list[tuple[Stream, Delta]]) -> None:
        by_sender: dict[Sender, list[tuple[Stream, Delta]]] = {}
        for stream, delta in additions:
            by_sender.setdefault(self._owners[stream.request_id], []).append((stream, delta))
        for sender, owned in by_sender.items():
            sender.push(owned)
        self._release([stream for stream, delta in additions if delta.finish_reason is not None])

    def fail(self, streams: list[Stream], error: str) -> None:
        """End streams with "[CODE] message"."""
        for stream in streams:
            self._owners[stream.request_id].fail([(stream, error)])
        self._release(streams)

    def poll_cancelled(self, stream: Stream) -> None:
        sender = self._owners.get(stream.request_id)
        if sender is not None:
            sender.poll_cancelled(stream)

    def close(self, timeout: float = 5.0) -> None:
        for sender in self._senders:
            sender.close(timeout)

    def _release(self, streams: list[Stream]) -> None:
        with self._lock:
            for stream in streams:
                sender = self._owners.pop(stream.request_id)
                sender.num_owned -= 1
