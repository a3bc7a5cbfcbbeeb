"""Ranks as processes of this machine, as many at a time as fit in its memory."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path

from builder.sharding.budget import MemoryBudget
from builder.sharding.process import Event, RankProcess
from builder.sharding.tasks import OnOutcome, Progress, RankFailure, RankResult, RankTask
from plansmith_errors import BuildError

_TICK = 0.25  # seconds between looks at the workers' memory
_log = logging.getLogger(__name__)


class LocalExecutor:
    """Runs tasks in the order given. A rank that fails leaves the others alone; Ctrl-C ends all.

    ``max_workers`` None: as many as there are cores. ``available_bytes`` tells the memory that is free now, None where
    nobody knows; then one rank is built at a time.
    """

    def __init__(self, max_workers: int | None, available_bytes: Callable[[], int | None]) -> None:
        self._max_workers = max_workers or usable_cores()
        self._available_bytes = available_bytes
        self._budget = MemoryBudget()

    def learn(self, task: RankTask, result: RankResult) -> None:
        """What an earlier run took for ``task``."""
        self._budget.learn(task, result.peak_rss_bytes)

    def run(self, tasks: Sequence[RankTask], scratch: Path, on_outcome: OnOutcome, on_progress: Progress) -> None:
        """Build in folders of ``scratch``, rank by rank: "rank0", "rank1", ...

        Raises BuildError before any work where the largest rank would not fit alone.
        """
        available = self._available_bytes()
        for task in tasks:
            shortage = self._budget.shortage(task, available)
            if shortage is not None:
                raise BuildError(f"rank {task.rank} {shortage}")
        waiting, running = list(tasks), dict[int, RankProcess]()
        events: queue.Queue[Event] = queue.Queue()
        try:
            while waiting or running:
                self._start_what_fits(waiting, running, scratch, events, on_outcome)
                self._take_events(running, events, on_outcome, on_progress)
        finally:
            for process in running.values():
                process.end()

    def _start_what_fits(
        self,
        waiting: list[RankTask],
        running: dict[int, RankProcess],
        scratch: Path,
        events: queue.Queue[Event],
        on_outcome: OnOutcome,
    ) -> None:
        while waiting and len(running) < self._max_workers:
            task, available = waiting[0], self._available_bytes()
            residents = [(process.task, process.sample()) for process in running.values()]
            if not self._budget.fits(task, available, residents):
                if running:
                    return
                # Memory became short since the start, or ranks take more than was estimated.
                shortage = self._budget.shortage(waiting.pop(0), available) or "does not fit in memory"
                on_outcome(RankFailure(rank=task.rank, kind="refused", message=shortage))
                continue
            running[task.rank] = RankProcess(waiting.pop(0), scratch, events)

    def _take_events(
        self,
        running: dict[int, RankProcess],
        events: queue.Queue[Event],
        on_outcome: OnOutcome,
        on_progress: Progress,
    ) -> None:
        """What was told since the last call; waits for it, but not for long."""
        try:
            rank, event = events.get(timeout=_TICK)
        except queue.Empty:
            for process in running.values():
                process.sample()
            return
        if "weight" in event:
            on_progress(rank, *event["weight"])
        elif "log" in event:
            level, name, message = event["log"]
            logging.getLogger(name).log(level, "rank %d: %s", rank, message)
        elif event:
            running[rank].keep(event)
        else:
            self._finish(running.pop(rank), on_outcome)

    def _finish(self, process: RankProcess, on_outcome: OnOutcome) -> None:
        outcome = process.outcome()
        if isinstance(outcome, RankResult):
            self._budget.learn(process.task, outcome.peak_rss_bytes)
        else:
            self._budget.learn(process.task, process.peak_rss_bytes, finished=False)
        on_outcome(outcome)


def usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
