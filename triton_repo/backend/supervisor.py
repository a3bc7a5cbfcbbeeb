"""The stub's housekeeping thread: dead-man switch, orphan check, cancelled requests that send nothing, metrics."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from itertools import islice

from triton_repo.backend.engine_client import EngineClient
from triton_repo.backend.protocol import Stats
from triton_repo.backend.stream import Stream

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
DEAD_MAN_S = 30.0
MAX_POLLS = 16
EXIT_ORPHANED = 71

PublishStats = Callable[[Stats, int, int], None]
"""Given the engine's statistics, the number of restarts and the number of refused requests."""


class Supervisor:
    """Runs until closed. ``make_publisher`` is called once, on the thread itself."""

    def __init__(self, client: EngineClient, make_publisher: Callable[[], PublishStats | None]) -> None:
        self._client = client
        self._make_publisher = make_publisher
        self._parent = os.getppid()
        self._closing = threading.Event()
        self._last_polled = -1
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(PERIOD_S * 4)
        # the stub ends when its model is unloaded; one that hangs on the way must not stay as an orphan
        faulthandler.dump_traceback_later(DEAD_MAN_S, exit=True)

    def _run(self) -> None:
        publish = self._make_publisher()
        while not self._closing.wait(PERIOD_S):
            # Needs no GIL once armed: ends a stub that hangs for good, as one cut off from its server does
            faulthandler.dump_traceback_later(DEAD_MAN_S, exit=True)
            if os.getppid() != self._parent:
                os._exit(EXIT_ORPHANED)
            try:
                self._poll_cancelled()
                self._publish(publish)
            except Exception:  # housekeeping must go on: without it the dead-man switch ends the stub
                logger.exception("housekeeping failed")

    def _poll_cancelled(self) -> None:
        """Look at a few silent streams in turn; streams that send are looked at by their senders."""
        silent = sorted(
            (s for s in self._client.open_streams() if s.last_sent is None or not s.is_streaming), key=_request_id
        )
        after = [s for s in silent if s.request_id > self._last_polled]
        for stream in islice(after or silent, MAX_POLLS):
            self._client.poll_cancelled(stream)
            self._last_polled = stream.request_id

    def _publish(self, publish: PublishStats | None) -> None:
        if publish is None:
            return
        stats = self._client.stats
        if stats is not None:
            publish(stats, self._client.num_restarts, self._client.num_refused)
        self._client.query_stats()


def _request_id(stream: Stream) -> int:
    return stream.request_id
