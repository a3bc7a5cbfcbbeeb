"""All ranks of an engine: those that are there already are kept, the others built, each in a process of its own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from builder.sharding import records
from builder.sharding.tasks import Besides, OnOutcome, Outcome, Progress, RankFailure, RankResult, RankTask
from plansmith_errors import BuildError

_log = logging.getLogger(__name__)
_SCRATCH = ".ranks"


class Executor(Protocol):
    """Where ranks are built."""

    def learn(self, task: RankTask, result: RankResult) -> None: ...

    def run(self, tasks: Sequence[RankTask], scratch: Path, on_outcome: OnOutcome, on_progress: Progress) -> None:
        """Build each task in ``scratch``/"rankN"; ``on_outcome`` is called as each ends, whatever became of it."""
        ...


def make_executor(name: Literal["local", "ray"], max_workers: int | None) -> Executor:
    """``max_workers`` None: as many ranks at a time as memory and cores allow."""
    if name == "ray":
        from builder.sharding.ray_cluster import RayExecutor

        return RayExecutor(max_workers)
    from builder.sharding.local import LocalExecutor

    return LocalExecutor(max_workers, _available_bytes)


def build_ranks(
    tasks: Sequence[RankTask],
    engine: Path,
    executor: Executor,
    on_progress: Progress = lambda rank, done, total, name: None,
    besides: Besides = dict,
) -> list[RankResult]:
    """Build every task's files into the directory ``engine``; results in the order of ``tasks``.

    ``besides`` is asked for where a rank is there already, or when one is built.

    A rank that fails does not spoil the others: they are built, and stay in ``engine`` for a next call, which builds
    only what is missing. Raises BuildError that names the ranks that failed. When the engine is whole, the caller
    calls ``records.forget_all``.
    """
    scratch = engine / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    results = _reused(tasks, engine, executor, besides)
    failures: dict[int, RankFailure] = {}
    by_rank = {task.rank: task for task in tasks}

    def on_outcome(outcome: Outcome) -> None:
        rank = outcome.rank
        if isinstance(outcome, RankFailure):
            _log.info("rank %d failed: %s", rank, outcome.message.strip().splitlines()[-1])
            failures[rank] = outcome
            return
        records.keep(outcome, by_rank[rank].key(besides()), scratch / f"rank{rank}", engine)
        results[rank] = outcome
        _log.info("rank %d built in %.1f s (%d of %d)", rank, outcome.seconds, len(results), len(tasks))

    missing = [task for task in tasks if task.rank not in results]
    try:
        if missing:
            scratch.mkdir()
            executor.run(missing, scratch, on_outcome, on_progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if failures:
        raise _failed(failures, len(tasks))
    return [results[task.rank] for task in tasks]


def _reused(tasks: Sequence[RankTask], engine: Path, executor: Executor, besides: Besides) -> dict[int, RankResult]:
    results = {}
    for task in tasks:
        found = records.find(task, engine, besides)
        if found is not None:
            results[task.rank] = found
            executor.learn(task, found)
    if results:
        _log.info("%d of %d ranks were built by an earlier run and are kept", len(results), len(tasks))
    return results


def _failed(failures: Mapping[int, RankFailure], num_ranks: int) -> Exception:
    """That of the lowest rank, with a word on the others. A bug keeps its stack trace."""
    for failure in failures.values():
        if failure.kind == "bug":
            return RuntimeError(f"rank {failure.rank} of {num_ranks} failed:\n{failure.message}")
    first = failures[min(failures)]
    others = sorted(set(failures) - {first.rank})
    also = f" (as did rank{'s' * (len(others) > 1)} {', '.join(map(str, others))})" if others else ""
    kept = num_ranks - len(failures)
    others_kept = "the other one is" if kept == 1 else f"the other {kept} are"
    rest = f"; {others_kept} built and kept: run it again to build what is missing" if kept else ""
    return BuildError(f"rank {first.rank} of {num_ranks} was not built{also}: {first.message}{rest}")


def _available_bytes() -> int | None:
    from builder.machine.memory import host_memory

    memory = host_memory()
    return None if memory is None else memory.available_bytes
