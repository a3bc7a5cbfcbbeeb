"""Large arrays cut over the threads of a pool, always in the same places: the bytes do not depend on the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")

_VALUES = 2**20  # of a part of an array with all inputs, unless it would be less than a quarter of the width
_WIDTH = 512  # at most: a tile of this width and height, 1 MB, stays in a core's second-level cache


def tiles(size: int, width: int = _WIDTH) -> list[slice]:
    """Parts of nearly equal size, at least two where there can be: two threads then have something to do."""
    step = max(-(-size // max(2, -(-size // width))), 1)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def output_tiles(num_inputs: int, num_outputs: int) -> list[slice]:
    """Of the columns of arrays [in, out]: narrower where they are tall, as each thread holds several parts of them."""
    return tiles(num_outputs, min(max(_VALUES // num_inputs, _WIDTH // 4), _WIDTH))


def run_all(pool: Executor, task: Callable[[T], object], places: Iterable[T]) -> None:
    """Wait for all tasks; raise what one of them raised. Not to be called from a task."""
    list(pool.map(task, places))
