"""Largest magnitudes that calibration saw: of each column of a linear's inputs, and of keys and values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Ranges:
    """Of the inputs, keys and values that are wanted, by the name under which a LayerRunner shows them."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._columns: dict[str, Float32 | None] = dict.fromkeys(wanted)

    def observe(self, name: str, inputs: Float32) -> None:
        """``inputs`` [num_tokens, ...]: all axes but the last are tokens, heads included."""
        if name not in self._columns or not len(inputs):
            return
        largest = np.abs(inputs.reshape(-1, inputs.shape[-1])).max(axis=0)
        before = self._columns[name]
        self._columns[name] = largest if before is None else np.maximum(before, largest)

    def __bool__(self) -> bool:
        return bool(self._columns)

    def items(self) -> list[tuple[str, Float32]]:
        return [(name, self.columns(name)) for name in self._columns]

    def columns(self, name: str) -> Float32:
        """Largest magnitude of each column, [in]; zeros if nothing was seen."""
        found = self._columns[name]
        return np.zeros(1, np.float32) if found is None else found
