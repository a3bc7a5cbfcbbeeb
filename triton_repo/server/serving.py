"""``plansmith serve`` without its console: serves until a signal comes, and tells what happens as events."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plansmith_errors import ServeError
from triton_repo.server.stub_watch import StubWatch
from triton_repo.server.triton_server import TritonServer

POLL_S = 0.2
STUB_CHECK_S = 1.0


@dataclass(frozen=True)
class ServerReady:
    model_name: str
    http_url: str
    grpc_address: str
    metrics_url: str
    pid: int
    seconds: float  # from the call to the first answer


@dataclass(frozen=True)
class ServerStopping:
    """The first signal came: new connections are refused, open streams finish. A second signal ends all at once."""

    signal_name: str


@dataclass(frozen=True)
class ServerStopped:
    drained: bool  # False: open streams were cut


ServeEvent = ServerReady | ServerStopping | ServerStopped


def serve(repository: Path, **settings: Any) -> Iterator[ServeEvent]:
    """Serve a repository until SIGINT or SIGTERM; ``settings`` are those of TritonServer. Main thread only.

    Yields ServerReady, ServerStopping, ServerStopped. Raises ServeError when the server cannot start or ends by itself,
    KeyboardInterrupt when a signal comes before it is ready.
    """
    started = time.monotonic()
    with _signals() as received:
        server = TritonServer(repository, **settings)
        try:
            server.start()
            received.is_serving = True
            seconds = time.monotonic() - started
            yield ServerReady(
                server.model_name, server.http_url, server.grpc_address, server.metrics_url, server.pid, seconds
            )
            _watch(server, received)
            yield ServerStopping(signal.Signals(received.first).name)
            server.request_stop()
            drained = _drain(server, received)
            server.kill()  # before the event, so that whoever sees it finds the ports free
            yield ServerStopped(drained)
        finally:
            server.kill()


class _Received:
    """Signals that came, as the handler counts them."""

    def __init__(self) -> None:
        self.is_serving = False
        self.first = 0
        self.count = 0
        self.arrived = threading.Event()

    def handle(self, number: int, _frame: Any) -> None:
        if not self.is_serving:
            raise KeyboardInterrupt  # there is nothing to drain: the start itself is broken off
        self.first = self.first or number
        self.count += 1
        self.arrived.set()


@contextmanager
def _signals() -> Iterator[_Received]:
    received = _Received()
    before = {number: signal.signal(number, received.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(server: TritonServer, received: _Received) -> None:
    stub = StubWatch(server.pid, server.is_ready)
    next_check = time.monotonic()
    while not received.arrived.wait(POLL_S):
        if (end := server.poll()) is not None:
            raise ServeError(end)
        if time.monotonic() >= next_check:
            next_check = time.monotonic() + STUB_CHECK_S
            if stub.is_dead():
                raise ServeError("the stub of Triton's Python backend died; the server is stopped, start it again")


def _drain(server: TritonServer, received: _Received) -> bool:
    """Wait for the server to end; False when a second signal or the drain timeout cuts it short."""
    deadline = time.monotonic() + server.drain_timeout
    while server.poll() is None:
        if received.count > 1 or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
