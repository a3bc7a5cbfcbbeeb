"""The weights of one decoder layer as calibration has them at the moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class LayerWeights(MutableMapping[str, Float32]):
    """Norms, linears and biases by their names in the checkpoint; to change one is to set another array."""

    def __init__(self, weights: Iterable[tuple[str, Float32]]) -> None:
        self._arrays = dict(weights)

    def settle(self, name: str, values: Float32) -> None:
        """Set a matrix that is only multiplied with from here on: it may be held as linears multiply it."""
        self[name] = values

    def scale_columns(self, name: str, factors: Float32) -> None:
        """Multiply a matrix [out, in] with ``factors`` [in]."""
        self[name] = self[name] * factors

    def scale_rows(self, name: str, divisors: npt.NDArray[np.float64]) -> None:
        """Divide a matrix [out, in] by ``divisors`` [out]."""
        self[name] = (self[name] / divisors[:, None]).astype(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return self[name].shape

    def rows(self, name: str, rows: slice) -> Float32:
        """Some rows of a matrix."""
        return self[name][rows]

    def __getitem__(self, name: str) -> Float32:
        return self._arrays[name]

    def __setitem__(self, name: str, values: Float32) -> None:
        self._arrays[name] = values

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
