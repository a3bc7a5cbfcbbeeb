"""Ranks spread over the machines of a Ray cluster, each in a worker process of its own as on one machine.

Checkpoint and engine directory lie on a file system that all of them share. Ray places a rank where its estimated
memory is free. The cluster is the one that RAY_ADDRESS names or that runs on this machine; without one, Ray is started
for the build.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from builder.sharding.budget import MemoryBudget, gibibytes
from builder.sharding.local import LocalExecutor
from builder.sharding.tasks import OnOutcome, Outcome, Progress, RankFailure, RankResult, RankTask
from plansmith_errors import BuildError

_Logged = list[tuple[int, str, str]]  # level, logger, message


class RayExecutor:
    """``max_workers`` None: as many ranks at a time as the cluster has room for. Progress is told per rank alone."""

    def __init__(self, max_workers: int | None) -> None:
        self._max_workers = max_workers
        self._budget = MemoryBudget()

    def learn(self, task: RankTask, result: RankResult) -> None:
        self._budget.learn(task, result.peak_rss_bytes)

    def run(self, tasks: Sequence[RankTask], scratch: Path, on_outcome: OnOutcome, on_progress: Progress) -> None:
        """See Executor. Raises BuildError where Ray is missing or no machine has memory for the largest rank."""
        with _cluster() as ray:
            self._check_memory(ray, tasks)
            run_rank = ray.remote(build_here)
            waiting, running = list(tasks), dict[Any, RankTask]()
            try:
                while waiting or running:
                    while waiting and len(running) < (self._max_workers or len(tasks)):
                        task = waiting.pop(0)
                        placed = run_rank.options(
                            num_cpus=1, memory=self._budget.expected(task), max_retries=0, name=f"rank {task.rank}"
                        )
                        running[placed.remote(task, str(scratch), _version())] = task
                    for done in ray.wait(list(running))[0]:
                        on_outcome(_outcome(ray, done, running.pop(done)))
            finally:
                for unfinished in running:
                    ray.cancel(unfinished, force=True)

    def _check_memory(self, ray: Any, tasks: Sequence[RankTask]) -> None:
        largest = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
        for task in tasks:
            needed = self._budget.expected(task)
            if needed > largest:
                raise BuildError(
                    f"rank {task.rank} needs about {gibibytes(needed)} GiB of memory to build, and the "
                    f"largest machine of the Ray cluster offers {gibibytes(int(largest))} GiB; add a larger one, "
                    "raise tp_size or pp_size, or keep weights out of the plans (build.weights external)"
                )


def build_here(task: RankTask, scratch: str, version: str | None) -> tuple[Outcome, _Logged]:
    """Build one rank on the machine that Ray chose; Ray has seen to its memory."""
    outcomes: list[Outcome] = []
    refusal = _unfit(scratch, version)
    if refusal is not None:
        return RankFailure(rank=task.rank, kind="refused", message=f"machine {socket.gethostname()} {refusal}"), []
    with _collected_log() as logged:
        LocalExecutor(1, lambda: None).run([task], Path(scratch), outcomes.append, lambda rank, done, total, name: None)
    return outcomes[0], logged


def _unfit(scratch: str, version: str | None) -> str | None:
    if _version() != version:
        return f"has plansmith {_version()}, and the build was started with {version}; install the same on all machines"
    if not Path(scratch).is_dir():
        return f"does not see {scratch}; put the artifact store on a file system that all machines of the cluster share"
    return None


def _outcome(ray: Any, done: Any, task: RankTask) -> Outcome:
    try:
        outcome, logged = ray.get(done)
    except (ray.exceptions.OutOfMemoryError, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        message = " ".join(str(error).split())[:300]
        return RankFailure(rank=task.rank, kind="killed", message=f"its Ray worker was lost: {message}")
    except ray.exceptions.RayError as error:
        return RankFailure(rank=task.rank, kind="bug", message=str(error))
    for level, name, text in logged:
        logging.getLogger(name).log(level, text)
    result: Outcome = outcome
    return result


@contextmanager
def _cluster() -> Iterator[Any]:
    try:
        import ray
    except ImportError:
        raise BuildError("executor ray needs Ray, which is not installed; run: pip install 'plansmith[ray]'") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BuildError(f"no Ray cluster can be reached or started: {reason}; check RAY_ADDRESS") from None
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


@contextmanager
def _collected_log() -> Iterator[_Logged]:
    """Warnings of this block, for whoever started the build."""
    logged: _Logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(  # type: ignore[method-assign]
        (record.levelno, record.name, record.getMessage())
    )
    logging.getLogger().addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger().removeHandler(handler)


def _version() -> str | None:
    try:
        return metadata.version("plansmith")
    except metadata.PackageNotFoundError:
        return None
