"""What the unquantized model's linears read and write in one layer, for as long as it is needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantize.calibration.shelf import Shelf, Shelved

Float32 = npt.NDArray[np.float32]


class AllSeen(Exception):  # noqa: N818 - no error: it ends a layer whose remaining modules nobody asked for
    """Everything that was asked for has been seen."""


@dataclass(frozen=True)
class ExactLayer:
    """By module one array for each window."""

    inputs: dict[str, list[Shelved]] = field(default_factory=dict)  # [num_tokens, in]
    outputs: dict[str, list[Shelved]] = field(default_factory=dict)  # [num_tokens, out], without the bias


@dataclass
class ExactWindow:
    """Takes what is wanted of one window; raises AllSeen when it has as many as ``stop_after``."""

    shelf: Shelf
    inputs_of: Collection[str]
    outputs_of: Collection[str]
    stop_after: int = -1
    inputs: dict[str, Shelved] = field(default_factory=dict)
    outputs: dict[str, Shelved] = field(default_factory=dict)

    def see_inputs(self, weight: str, inputs: Float32) -> None:
        """``inputs`` [num_tokens, in] of the linear with that weight."""
        self._take(weight, inputs, self.inputs_of, self.inputs)

    def see_outputs(self, weight: str, outputs: Float32) -> None:
        """``outputs`` [num_tokens, out]"""
        self._take(weight, outputs, self.outputs_of, self.outputs)

    def _take(self, weight: str, values: Float32, wanted: Collection[str], taken: dict[str, Shelved]) -> None:
        module = weight.removesuffix(".weight")
        if module in wanted:
            taken[module] = self.shelf.put(values)
            if len(self.inputs) + len(self.outputs) == self.stop_after:
                raise AllSeen
