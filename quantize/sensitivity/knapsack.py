"""The best choice of one option for each unit: a multiple-choice knapsack, solved by dynamic programming over bytes.

Exact when the sizes have a divisor of which there are at most 65536 in the span from smallest to largest choice, as
those of layers of one shape have. Otherwise sizes count as rounded up to 1/65536 of the span, so that a choice always
fits, and is at most one step per unit from the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

_MAX_STEPS = 2**16


@dataclass(frozen=True)
class Option:
    nbytes: int
    error: float  # finite, at least 0; those of a choice add up


Choice = tuple[int, ...]
"""An index into each unit's options."""


class Knapsack:
    """The least error for every number of bytes. Among equal errors the fewest bytes win, then the first option."""

    def __init__(self, units: Sequence[Sequence[Option]]) -> None:
        self._units = units
        self._floor = sum(min(option.nbytes for option in options) for options in units)
        spans = [max(option.nbytes for option in options) - _smallest(options) for options in units]
        self.smallest, self.largest = self._floor, self._floor + sum(spans)
        self._step = _step(units, sum(spans))
        num_steps = sum(-(-span // self._step) for span in spans)
        self._errors: npt.NDArray[np.float64] = np.zeros(num_steps + 1)
        self._chosen = [self._add(options) for options in units]

    @property
    def least_error(self) -> float:
        return float(self._errors[-1])

    @property
    def smallest_error(self) -> float:
        """The least error of the smallest choice."""
        return float(self._errors[0])

    def within_bytes(self, max_bytes: float) -> Choice | None:
        """The choice of the least error that takes at most ``max_bytes``; None when there is none."""
        if max_bytes < self._floor:
            return None
        last = len(self._errors) - 1
        # Sizes that were rounded up may need more steps for the largest choice than its bytes have.
        place = last if max_bytes >= self.largest else min(int((max_bytes - self._floor) // self._step), last)
        return self._trace(self._first_at_most(self._errors[place]))

    def within_error(self, max_error: float) -> Choice | None:
        """The smallest choice whose error is at most ``max_error``; None when there is none."""
        return self._trace(self._first_at_most(max_error)) if self._errors[-1] <= max_error else None

    def _first_at_most(self, error: float) -> int:
        # Errors fall as bytes grow, so their negatives are in order.
        return int(np.searchsorted(-self._errors, -error, side="left"))

    def _add(self, options: Sequence[Option]) -> npt.NDArray[np.uint8]:
        """Take up one unit; returns its option of the best choice for each number of steps."""
        best = np.full_like(self._errors, np.inf)
        chosen = np.zeros(len(best), np.uint8)
        for index in sorted(range(len(options)), key=lambda index: (options[index].nbytes, index)):
            steps = self._steps(options, index)
            error = self._errors[: len(best) - steps] + options[index].error
            better = error < best[steps:]
            best[steps:][better] = error[better]
            chosen[steps:][better] = index
        self._errors = best
        return chosen

    def _steps(self, options: Sequence[Option], index: int) -> int:
        return -(-(options[index].nbytes - _smallest(options)) // self._step)

    def _trace(self, place: int) -> Choice:
        choice = []
        for options, chosen in zip(reversed(self._units), reversed(self._chosen), strict=True):
            choice.append(int(chosen[place]))
            place -= self._steps(options, choice[-1])
        return tuple(reversed(choice))


def _smallest(options: Sequence[Option]) -> int:
    return min(option.nbytes for option in options)


def _step(units: Sequence[Sequence[Option]], span: int) -> int:
    divisor = gcd(*(option.nbytes - _smallest(options) for options in units for option in options)) or 1
    return divisor if span // divisor <= _MAX_STEPS else -(-span // _MAX_STEPS)
