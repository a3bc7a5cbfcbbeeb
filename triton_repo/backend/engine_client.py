"""The stub's side of the engine process: starts it, passes requests and outputs, and replaces it when it dies.

One thread owns the process and reads its messages. While no engine is ready, new requests wait in a backlog; when one
dies, every request it had ends with an error at once.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal

from plansmith_errors import EngineError
from triton_repo.backend.engine_child import EngineChild
from triton_repo.backend.pacing import Pacing
from triton_repo.backend.protocol import (
    Cancel,
    Command,
    Delta,
    Event,
    LoadFailed,
    Outputs,
    QueryStats,
    Ready,
    Refused,
    Stats,
    Submit,
)
from triton_repo.backend.senders import SenderPool
from triton_repo.backend.stream import Stream

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "closed"]

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


class EngineClient:
    """Thread-safe. ``command`` is the argument list that runs an engine process."""

    def __init__(self, command: list[str], *, max_queue_size: int, pacing: Pacing | None = None) -> None:
        self._command = command
        self._max_queue_size = max_queue_size
        self._pool = SenderPool(pacing or Pacing(), self.cancel)
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._backlog: dict[int, Submit] = {}
        self._child: EngineChild | None = None
        self._ready: Ready | None = None
        self._failure = ""
        self._state: State = "starting"
        self._first_attempt = threading.Event()
        self._close_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats: Stats | None = None
        self.num_restarts = 0
        self.num_refused = 0

    def start(self, timeout: float) -> Ready:
        """Start the first engine and wait until it is ready. Raises EngineError with the reason when it cannot load."""
        self._thread.start()
        if not self._first_attempt.wait(timeout):
            self.close()
            raise EngineError(f"the engine was not ready within {timeout:.0f} s; see the server log")
        ready = self._ready
        if ready is None:
            self.close()
            raise EngineError(self._failure)
        return ready

    def submit(self, stream: Stream, request: Submit) -> str | None:
        """Admit a request, or return "[CODE] message" when it is refused at once."""
        with self._lock:
            refusal = self._refusal() or self._too_long(request)
            if refusal is not None:
                self.num_refused += 1
                return refusal
            self._streams[request.request_id] = stream
            self._pool.open(stream)
            if self._state != "ready":
                self._backlog[request.request_id] = request
                return None
        self._send(request)
        return None

    def cancel(self, request_id: int) -> None:
        """Ask the engine to stop a request; its end comes back like any other."""
        with self._lock:
            waiting = self._backlog.pop(request_id, None)
            stream = self._streams.pop(request_id) if waiting is not None else None
        if stream is not None:
            self._pool.fail([stream], "[CANCELLED] the request was cancelled")
        else:
            self._send(Cancel(request_id))

    def query_stats(self) -> None:
        """Ask for fresh ``stats``; they arrive a moment later."""
        if self._state == "ready":
            self._send(QueryStats())

    def open_streams(self) -> list[Stream]:
        with self._lock:
            return list(self._streams.values())

    def poll_cancelled(self, stream: Stream) -> None:
        """Look whether the client of a stream that sends nothing yet has gone."""
        self._pool.poll_cancelled(stream)

    def close(self, timeout: float = 10.0) -> None:
        """Stop the engine and the senders. Streams still open end with [UNAVAILABLE]."""
        self._close_requested.set()
        with self._lock:
            self._state = "closed"
            child = self._child
        if child is not None:
            child.stop(timeout)
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._pool.close()

    def _refusal(self) -> str | None:
        if self._state in ("failed", "closed"):
            return f"[UNAVAILABLE] the engine is not running: {self._failure or 'the model is being unloaded'}"
        running = self._ready.max_batch_size if self._ready else 0
        limit = self._max_queue_size + running
        if len(self._streams) >= limit:
            return (
                f"[UNAVAILABLE] {len(self._streams)} requests are open; {running} can run and "
                f"{self._max_queue_size} wait (max_queue_size); retry later"
            )
        return None

    def _too_long(self, request: Submit) -> str | None:
        """Refuse a text that cannot fit before it is tokenized: that takes a second per megabyte, and others wait."""
        if self._ready is None or request.text is None:
            return None
        size, limit = len(request.text.encode()), self._ready.max_prompt_bytes
        if size <= limit:
            return None
        tokens = self._ready.max_seq_len
        return (
            f"[INVALID_ARGUMENT] the prompt has {size} bytes; {tokens} tokens (max_seq_len) are at most {limit} bytes"
        )

    def _send(self, command: Command) -> None:
        child = self._child
        if child is not None:
            child.send(command)

    def _run(self) -> None:
        retry = FIRST_RETRY_S
        while not self._close_requested.is_set():
            reason = self._run_engine()
            if self._close_requested.is_set():
                self._after_death("the model is being unloaded", can_retry=False)
                return
            was_ready = self._state == "ready"
            logger.error("%s", reason)
            self._after_death(reason, can_retry=was_ready)
            if not self._first_attempt.is_set():
                self._first_attempt.set()
                return
            if was_ready:
                retry = FIRST_RETRY_S
            else:  # it could not even load: trying again in a tight loop would only heat the machine
                self._close_requested.wait(retry)
                retry = min(retry * 2, LAST_RETRY_S)
            self.num_restarts += 1

    def _run_engine(self) -> str:
        """Start one engine process, serve it to its end and say how it ended."""
        with self._lock:
            if self._state != "closed":
                self._state = "starting"
        try:
            child = EngineChild(self._command)
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        with self._lock:
            self._child = child
            is_closed = self._state == "closed"
        if is_closed:  # while the process was being started: nobody else would end it
            child.stop(0)
        load_error = ""
        try:
            for event in child.events():
                if isinstance(event, LoadFailed):
                    load_error = event.message
                else:
                    self._handle(event)
        except EngineError as error:
            child.kill()
            return str(error)
        except Exception as error:  # a bug of ours: this thread must live on, or no engine would ever be started again
            logger.exception("reading from the engine process failed")
            child.kill()
            return f"{type(error).__name__}: {error}"
        finally:
            self._child = None
        return load_error or child.describe_end()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Outputs):
            self._on_outputs(event.deltas)
        elif isinstance(event, Refused):
            with self._lock:
                stream = self._streams.pop(event.request_id, None)
            if stream is not None:
                self._pool.fail([stream], f"[{event.code}] {event.message}")
        elif isinstance(event, Stats):
            self.stats = event
        elif isinstance(event, Ready):
            self._on_ready(event)

    def _on_outputs(self, deltas: list[Delta]) -> None:
        with self._lock:
            additions = [(self._streams[d.request_id], d) for d in deltas if d.request_id in self._streams]
            unknown = [d.request_id for d in deltas if d.request_id not in self._streams and d.finish_reason is None]
            for _, delta in additions:
                if delta.finish_reason is not None:
                    del self._streams[delta.request_id]
        self._pool.push(additions)
        for request_id in unknown:  # it was sent to a dying engine and reached the new one after its stream had ended
            self._send(Cancel(request_id))

    def _on_ready(self, ready: Ready) -> None:
        with self._lock:
            self._ready = ready
            if self._state == "starting":
                self._state = "ready"
            backlog, self._backlog = list(self._backlog.values()), {}
        for request in backlog:
            self._send(request)
        self._first_attempt.set()

    def _after_death(self, reason: str, *, can_retry: bool) -> None:
        with self._lock:
            if self._state != "closed":
                self._state = "starting" if can_retry else "failed"
            self._failure = reason
            streams = self._take_streams()
        self._pool.fail(streams, f"[UNAVAILABLE] {reason}")

    def _take_streams(self) -> list[Stream]:
        """All open streams, which are then no longer open. The lock is held."""
        streams, self._streams = list(self._streams.values()), {}
        self._backlog.clear()
        return streams
