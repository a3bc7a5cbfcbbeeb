"""Ranks are built in processes of their own: as many as fit in memory, and none is spoilt by another's failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from builder.sharding import records
from builder.sharding.budget import MemoryBudget
from builder.sharding.local import LocalExecutor
from builder.sharding.tasks import RankTask
from builder.sharding.workers import build_ranks
from plansmith_errors import BuildError

GIB = 2**30


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.mkdir()
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    return path


def tasks(log: Path, count: int = 3, memory_bytes: int = GIB // 8, **arguments) -> list[RankTask]:
    function = "rank_functions:write"
    return [
        RankTask(
            rank=rank,
            function=function,
            arguments={"rank": rank, "log": str(log), **arguments},
            memory_bytes=memory_bytes,
        )
        for rank in range(count)
    ]


def executor(available: int | None = 64 * GIB, max_workers: int | None = 4) -> LocalExecutor:
    return LocalExecutor(max_workers, lambda: available)


def runs(log: Path) -> list[int]:
    """Ranks in the order in which their functions came to their ends."""
    return [int(file.name.split("-")[0]) for file in sorted(log.iterdir(), key=lambda file: file.name.split("-")[1])]


def test_every_rank_has_its_files_its_report_and_what_it_took(engine, log):
    told = []
    results = build_ranks(tasks(log), engine, executor(), lambda *weight: told.append(weight))
    assert [result.report["rank"] for result in results] == [0, 1, 2]
    assert [(engine / f"rank{rank}.plan").read_bytes() for rank in range(3)] == [
        b"plan of 0",
        b"plan of 1",
        b"plan of 2",
    ]
    assert sorted(told) == [(rank, 1, 2, "model.norm.weight") for rank in range(3)]
    assert all(5e6 < result.peak_rss_bytes < 2e9 for result in results)
    records.forget_all(engine)
    assert sorted(path.name for path in engine.iterdir()) == ["rank0.plan", "rank1.plan", "rank2.plan"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("refuse", "TensorRT refuses the network: no kernel"),
        ("kill", r"its process was killed \(SIGKILL\).*, as the system does when memory runs out"),
        ("abort", r"its process died of SIGABRT.*; the last it said: free\(\): invalid pointer"),
        ("exit", "its process ended with exit code 7"),
    ],
)
def test_a_rank_that_fails_is_named_and_built_alone_the_next_time(engine, log, how, expected):
    with pytest.raises(BuildError, match=f"^rank 1 of 3 was not built: {expected}; the other 2 are built and kept"):
        build_ranks(with_key(tasks(log, fail={"1": how})), engine, executor())
    assert sorted(runs(log)) == [0, 2]
    results = build_ranks(with_key(tasks(log)), engine, executor())
    assert [result.reused for result in results] == [True, False, True]
    assert sorted(runs(log)) == [0, 1, 2]


def with_key(made: list[RankTask]) -> list[RankTask]:
    """The same task whether it fails or not."""

    class Task(RankTask):
        def key(self, besides):
            return f"rank {self.rank}"

    return [Task(**vars(task)) for task in made]


def test_ranks_of_another_source_are_built_again(engine, log):
    with pytest.raises(BuildError, match="the other 2 are built and kept"):
        build_ranks(with_source(tasks(log, fail={"1": "refuse"})), engine, executor(), besides=lambda: {"source": "a"})
    results = build_ranks(with_source(tasks(log)), engine, executor(), besides=lambda: {"source": "b"})
    assert not any(result.reused for result in results)


def with_source(made: list[RankTask]) -> list[RankTask]:
    """The same task but for what is besides it."""

    class Task(RankTask):
        def key(self, besides):
            return f"rank {self.rank} of {besides['source']}"

    return [Task(**vars(task)) for task in made]


def test_a_bug_of_ours_keeps_its_stack_trace(engine, log):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 3 failed:.*rank_functions\.py.*KeyError: 'lost'"):
        build_ranks(tasks(log, fail={"1": "bug"}), engine, executor())


def test_several_failures_are_one_line(engine, log):
    failing = tasks(log, 4, fail={"0": "refuse", "2": "refuse", "3": "kill"})
    with pytest.raises(
        BuildError, match=r"^rank 0 of 4 was not built \(as did ranks 2, 3\): TensorRT refuses"
    ) as caught:
        build_ranks(failing, engine, executor())
    assert "\n" not in str(caught.value)


def test_other_arguments_or_lost_files_are_built_anew(engine, log):
    build_ranks(tasks(log), engine, executor())
    (engine / "rank2.plan").unlink()
    assert [result.reused for result in build_ranks(tasks(log), engine, executor())] == [True, True, False]
    assert not any(result.reused for result in build_ranks(tasks(log, seconds=0.01), engine, executor()))


def test_what_libraries_print_and_log_is_not_taken_for_a_result(engine, log, caplog):
    build_ranks(tasks(log, fail={"0": "print", "1": "warn"}), engine, executor())
    assert "rank 1: int4 groups are unusual" in caplog.text


def test_ranks_are_built_side_by_side_only_as_memory_allows(engine, log):
    needed = GIB // 2
    one_at_a_time = executor(available=2 * needed + GIB // 8)
    peak = {"now": 0, "most": 0}
    build_ranks(tasks(log, 2, memory_bytes=needed, seconds=0.2), engine, Watched(one_at_a_time, peak))
    assert peak["most"] == 1
    records.forget_all(engine)
    build_ranks(tasks(log, 3, memory_bytes=needed, seconds=0.5), engine, Watched(executor(), peak))
    assert peak["most"] > 1


class Watched:
    """An executor, and how many of its workers live at a time."""

    def __init__(self, inner: LocalExecutor, peak: dict[str, int]) -> None:
        self._inner, self._peak = inner, peak
        self.learn = inner.learn

    def run(self, waiting, scratch, on_outcome, on_progress):
        def count(rank, *weight):
            self._peak["now"] += 1
            self._peak["most"] = max(self._peak.values())
            on_progress(rank, *weight)

        def end(outcome):
            self._peak["now"] -= 1
            on_outcome(outcome)

        self._inner.run(waiting, scratch, end, count)


def test_a_rank_that_would_never_fit_is_refused_before_any_work(engine, log):
    with pytest.raises(BuildError, match=r"rank 0 needs about 8.5 GiB .* and 4.0 GiB are available; free memory"):
        build_ranks(tasks(log, memory_bytes=8 * GIB), engine, executor(available=4 * GIB))
    assert not runs(log)
    assert not list(engine.iterdir())


def test_ranks_that_take_more_than_was_estimated_are_waited_for(engine, log):
    """The first takes 16 times what was estimated: the others are known to, and are not started side by side."""
    peak = {"now": 0, "most": 0}
    learning = executor(available=int(1.3 * GIB), max_workers=1)
    build_ranks(tasks(log, 1, memory_bytes=GIB // 40, hold_bytes=GIB // 2), engine, learning)
    learning._max_workers = 4
    records.forget_all(engine)
    build_ranks(tasks(log, 3, memory_bytes=GIB // 40, seconds=0.2), engine, Watched(learning, peak))
    assert peak["most"] == 1


def test_a_rank_that_failed_early_says_nothing_of_the_memory_of_others():
    task, *_ = tasks(Path(), 1, memory_bytes=GIB)
    budget = MemoryBudget()
    budget.learn(task, GIB // 10, finished=False)
    assert budget.expected(task) == GIB
    budget.learn(task, 3 * GIB, finished=False)  # killed when it had more than was thought
    assert budget.expected(task) > 3 * GIB
    budget.learn(task, None)
    assert MemoryBudget().expected(task) == GIB


def test_where_nobody_knows_the_memory_ranks_are_built_one_by_one(engine, log):
    peak = {"now": 0, "most": 0}
    build_ranks(tasks(log, seconds=0.1), engine, Watched(executor(available=None), peak))
    assert peak["most"] == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_build_is_the_end_of_its_workers(tmp_path, log, how):
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_rank_workers import tasks, executor, build_ranks
        engine = Path({str(tmp_path / "engine")!r})
        engine.mkdir()
        build_ranks(tasks(Path({str(log)!r}), fail={{"1": "hang", "2": "hang"}}), engine, executor())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.PIPE)
    built = tmp_path / "engine" / ".built-rank0.json"
    workers = wait_for(lambda: built.exists() and len(found := psutil.Process(parent.pid).children()) == 2 and found)
    os.kill(parent.pid, how)
    parent.communicate(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert built.exists()  # and a next build goes on from there
    assert (tmp_path / "engine" / ".ranks").exists() == (how == signal.SIGKILL)


def wait_for(condition, seconds: float = 30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError
