"""Several ranks in one process: those of a tensor-parallel group side by side, pipeline stages one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from builder.network.interpreter.interpreter import Collective
from builder.network.interpreter.meeting import Meeting, RankEndedError
from builder.network.interpreter.values import Array
from builder.parallel import Parallelism
from plansmith_errors import BuildError

RankRun = Callable[[int, Mapping[str, Array]], dict[str, Array]]
"""Runs one rank, by its world number, with what the stage before it handed on (none: an empty mapping)."""


class Meetings:
    """The meetings of all tensor-parallel groups; gives each rank the collective that its interpreter needs."""

    def __init__(self, parallelism: Parallelism) -> None:
        groups = sorted({rank.tp_group for rank in parallelism.ranks()})
        self.stages = [Meeting(group) for group in groups]
        self._tp_size = parallelism.tp_size

    def collective(self, rank: int) -> Collective:
        """What the interpreter of world rank ``rank`` is given."""
        return partial(self.stages[rank // self._tp_size].collective, rank)


def run_lockstep(meetings: Meetings, run: RankRun) -> list[dict[str, Array]]:
    """One step of all ranks; returns their outputs by world rank.

    "hidden_out" of a stage becomes "hidden_in" of the next, of the same place in its group. Raises the first failed
    rank's error, with the rank named.
    """
    outputs: list[dict[str, Array]] = []
    for stage in meetings.stages:
        handed_on = [_handed_on(outputs[rank - len(stage.ranks)]) if outputs else {} for rank in stage.ranks]
        pairs = zip(stage.ranks, handed_on, strict=True)
        outputs += _run_stage(stage, [partial(run, rank, given) for rank, given in pairs])
    return outputs


def _handed_on(outputs: Mapping[str, Array]) -> dict[str, Array]:
    if "hidden_out" not in outputs:
        raise BuildError(f"a pipeline stage gave {', '.join(outputs)} and no hidden_out for the next stage")
    return {"hidden_in": outputs["hidden_out"]}


def _run_stage(stage: Meeting, runs: Sequence[Callable[[], dict[str, Array]]]) -> list[dict[str, Array]]:
    if len(runs) == 1:
        return [runs[0]()]
    results: dict[int, dict[str, Array]] = {}
    errors: dict[int, Exception] = {}

    def run(rank: int, compute: Callable[[], dict[str, Array]]) -> None:
        try:
            results[rank] = compute()
        except Exception as error:
            errors[rank] = error
        finally:
            stage.end(rank)

    stage.start()
    threads = [threading.Thread(target=run, args=pair) for pair in zip(stage.ranks, runs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors)
    return [results[rank] for rank in stage.ranks]


def _raise_first(errors: Mapping[int, Exception]) -> None:
    """That of a rank that failed by itself, before those of ranks that waited for it."""
    for rank, error in sorted(errors.items(), key=lambda pair: isinstance(pair[1], RankEndedError)):
        if isinstance(error, (BuildError, RankEndedError)):
            raise BuildError(f"rank {rank}: {error}") from error
        raise error
