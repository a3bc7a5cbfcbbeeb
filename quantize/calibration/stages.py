"""What happens to activations between the linears of a layer that all windows go through side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.calibration.shelf import Shelf, Shelved

Float32 = npt.NDArray[np.float32]
ByWindow = Callable[[int], Float32]


class Stages:
    """Each result is a function of the window's number. Calls of one window do not overlap; others may."""

    def __init__(
        self, num_windows: int, pool: Executor, shelf: Shelf, on_inputs: Callable[[str, Sequence[Shelved]], None]
    ) -> None:
        self._num_windows, self._pool, self._shelf = num_windows, pool, shelf
        self._on_inputs = on_inputs

    def gather(self, weight: str, compute: ByWindow, on_computed: Callable[[], None]) -> ByWindow:
        """Compute the inputs [num_tokens, in] of a linear for all windows, before any goes on.

        When this returns, the weights of all linears that read the same inputs have the values to go on with; before
        these are sought, ``on_computed`` may free what is in the way.
        """
        shelved = self._compute(compute)
        on_computed()
        self._on_inputs(weight, shelved)
        return lambda window: shelved[window].read()

    def store(self, compute: ByWindow) -> ByWindow:
        """Compute something for all windows, now."""
        shelved = self._compute(compute)
        return lambda window: shelved[window].read()

    def remember(self, compute: ByWindow) -> ByWindow:
        """Compute something when it is first asked for, and keep it for the next time."""
        shelved: dict[int, Shelved] = {}

        def read(window: int) -> Float32:
            if window not in shelved:
                shelved[window] = self._shelf.put(compute(window))
            return shelved[window].read()

        return read

    def _compute(self, compute: ByWindow) -> list[Shelved]:
        return list(self._pool.map(lambda window: self._shelf.put(compute(window)), range(self._num_windows)))
