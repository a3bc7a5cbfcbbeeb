"""How many ranks fit in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable

from builder.sharding.tasks import RankTask

_RESERVE = 512 << 20  # bytes left to the rest of the machine
_MARGIN = 1.1  # ranks of one model are alike, not the same


class MemoryBudget:
    """Estimates, corrected by what finished ranks took."""

    def __init__(self) -> None:
        self._ratios: list[float] = []  # of the peak to the estimate

    def learn(self, task: RankTask, peak_rss_bytes: int | None, *, finished: bool = True) -> None:
        """One that did not finish tells only that it takes more than was thought, if so."""
        if peak_rss_bytes is not None and (finished or peak_rss_bytes > self.expected(task)):
            self._ratios.append(peak_rss_bytes / task.memory_bytes)

    def expected(self, task: RankTask) -> int:
        """Bytes that ``task`` will take at most."""
        return int(task.memory_bytes * (max(self._ratios) * _MARGIN if self._ratios else 1.0))

    def fits(self, task: RankTask, available: int | None, running: Iterable[tuple[RankTask, int]]) -> bool:
        """Whether ``task`` can start beside the ``running`` ones, which have so many resident bytes each.

        ``available`` bytes are free now, and the running ones will take more of them; None: nobody knows.
        """
        running = list(running)
        if available is None:
            return not running
        growth = sum(max(self.expected(other) - resident, 0) for other, resident in running)
        return self.needed(task) + growth <= available

    def needed(self, task: RankTask) -> int:
        return self.expected(task) + _RESERVE

    def shortage(self, task: RankTask, available: int | None) -> str | None:
        """Why ``task`` would not fit even alone; None: it does."""
        if available is None or self.needed(task) <= available:
            return None
        return (
            f"needs about {gibibytes(self.needed(task))} GiB of memory to build, and {gibibytes(available)} GiB are "
            "available; free memory, build on a larger machine, raise tp_size or pp_size, or keep weights out of the "
            "plans (build.weights external)"
        )


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
