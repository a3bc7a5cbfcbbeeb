"""A rank's worker process, seen from the parent."""

from __future__ import annotations

import json
import logging
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from builder.python_process import python_command
from builder.sharding.budget import gibibytes
from builder.sharding.tasks import Outcome, RankFailure, RankResult, RankTask
from builder.sharding.worker import proc_status_bytes

Event = tuple[int, dict[str, Any]]
"""A rank and what its worker told; an empty one: it will not tell more."""

_PATIENCE = 5.0  # seconds between asking a worker to end and ending it


class RankProcess:
    """Started at once. Its events come through ``events``."""

    def __init__(self, task: RankTask, scratch: Path, events: queue.Queue[Event]) -> None:
        self.task = task
        self.output = scratch / f"rank{task.rank}"
        self._log = scratch / f"rank{task.rank}.log"
        self._events = events
        self._last: dict[str, Any] = {}
        self.peak_rss_bytes: int | None = None
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches the parent alone, which ends its workers in order.
            self._process = subprocess.Popen(
                python_command("builder.sharding.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._give_job()

    def sample(self) -> int:
        """Resident bytes now; keeps the peak for the case that the worker does not live to tell it."""
        self.peak_rss_bytes = proc_status_bytes(self._process.pid, "VmHWM") or self.peak_rss_bytes
        return proc_status_bytes(self._process.pid, "VmRSS") or 0

    def keep(self, event: dict[str, Any]) -> None:
        """``event`` is a result or an error."""
        self._last = event

    def outcome(self) -> Outcome:
        """What became of the rank, after its last event."""
        status, rank = self._process.wait(), self.task.rank
        if "result" in self._last:
            peak = self._last["peak"]
            return RankResult(
                rank=rank, report=self._last["result"], seconds=self._last["seconds"], peak_rss_bytes=peak
            )
        if "error" in self._last:
            return RankFailure(rank=rank, kind=self._last["kind"], message=self._last["error"])
        return RankFailure(rank=rank, kind="killed", message=self._how_it_died(status))

    def end(self) -> None:
        """Ends it at once if it lives."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _give_job(self) -> None:
        job = {
            "function": self.task.function,
            "arguments": dict(self.task.arguments),
            "output": str(self.output),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the worker was started without standard input")
        try:
            with stdin:
                stdin.write(json.dumps(job).encode())
        except BrokenPipeError:  # it is dead already; outcome() tells how it died
            logging.getLogger(__name__).debug("rank %d took no job", self.task.rank)

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                for line in lines:
                    self._events.put((self.task.rank, json.loads(line)))
        self._events.put((self.task.rank, {}))

    def _how_it_died(self, status: int) -> str:
        if status >= 0:
            return f"its process ended with exit code {status}{self._last_words()}"
        name = signal.Signals(-status).name
        reached = "" if self.peak_rss_bytes is None else f" at {gibibytes(self.peak_rss_bytes)} GiB"
        if status == -signal.SIGKILL:
            return f"its process was killed ({name}){reached}, as the system does when memory runs out"
        return f"its process died of {name}{reached}{self._last_words()}"

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; the last it said: {words[:200]}" if words else ""
