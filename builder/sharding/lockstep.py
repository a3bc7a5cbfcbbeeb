"""Ranks of one machine in lock-step: a thread each, which meet at every collective; for proofs, not for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Protocol, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class LockstepError(RuntimeError):
    """A rank waits at a collective for one that failed, or that has called fewer of them and is done."""


class Exchange(Protocol):
    """What one rank of a group meets the others with. All ranks of a group call it equally often."""

    def __call__(self, x: T) -> list[T]:
        """Give ``x`` and get that of every rank, in the group's order. Nobody may change what others gave."""
        ...


def all_reduce(exchange: Exchange, x: T) -> T:
    """The sum over the group, added in its order on each rank, so that all have the same bits."""
    parts = exchange(x)
    return cast(T, reduce(add, cast("list[object]", parts)))


def run_lockstep(group: Sequence[int], work: Callable[[int, Exchange], R]) -> list[R]:
    """``work(rank, exchange)`` for each rank of ``group``, in the group's order of results.

    A rank that fails ends all of them, with its own error.
    """
    if len(group) == 1:
        return [work(group[0], _alone)]
    meeting = _Meeting(len(group))
    results: dict[int, R] = {}
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(group[index], meeting.exchange_of(index))
        except BaseException as error:
            failures.append(error)
        finally:
            meeting.leave()

    threads = [threading.Thread(target=run, args=(index,), name=f"rank-{rank}") for index, rank in enumerate(group)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures, key=lambda error: isinstance(error, LockstepError))
    return [results[index] for index in range(len(group))]


def _alone(x: T) -> list[T]:
    return [x]


class _Meeting:
    """Rounds of giving and taking. A round that a rank left before it can never be whole: those who wait are told."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: list[dict[int, object]] = []
        self._changed = threading.Condition()
        self._left = False

    def exchange_of(self, index: int) -> Exchange:
        rounds_done = 0

        def exchange(x: T) -> list[T]:
            nonlocal rounds_done
            rounds_done += 1
            return cast("list[T]", self._meet(rounds_done - 1, index, x))

        return exchange

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _meet(self, number: int, index: int, x: object) -> list[object]:
        with self._changed:
            if number == len(self._rounds):
                self._rounds.append({})
            given = self._rounds[number]
            given[index] = x
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == self._size or self._left)
            if len(given) < self._size:
                raise LockstepError(f"collective {number}: {len(given)} of {self._size} ranks came")
            if number:
                self._rounds[number - 1] = {}  # taken by all, who are here: free what they gave
            return [given[rank] for rank in range(self._size)]
