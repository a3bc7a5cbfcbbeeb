"""The weights of a layer in calibration, as torch multiplies them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quantize import LayerWeights

if TYPE_CHECKING:
    from torch import Tensor

Float32 = npt.NDArray[np.float32]
Scale = Callable[[Float32, slice], object]  # of some rows, which these are
"""Changes values in place: a matrix in doubles beside them would be the peak of a layer."""

_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16: twice as fast as float32 and more."""
    import torch

    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _CAPABILITIES)


class Bfloat16Weights(LayerWeights):
    """A layer whose linears multiply bfloat16: matrices are held in the smallest type that has all their digits.

    A float32 array of one is made each time that it is asked for.
    """

    def __init__(self, weights: Iterable[tuple[str, Float32]]) -> None:
        super().__init__(())
        self._matrices: dict[str, Tensor] = {}
        self._scales: dict[str, list[Scale]] = {}  # by which a matrix is scaled, in turn, when it is asked for
        self._halves: dict[str, Tensor] = {}  # of matrices that are held in other types, or scaled
        self._lock = threading.Lock()
        self.update(weights)

    def bfloat16(self, name: str) -> Tensor:
        """[out, in], made at its first use where it is not held so. Any thread may ask."""
        import torch

        with self._lock:
            if name not in self._scales and self._matrices[name].dtype == torch.bfloat16:
                return self._matrices[name]
            if name not in self._halves:
                self._halves[name] = torch.from_numpy(self[name]).bfloat16()
            return self._halves[name]

    def forget_copies(self) -> None:
        """Those that are multiplied with again are made again."""
        with self._lock:
            self._halves.clear()

    def settle(self, name: str, values: Float32) -> None:
        """See LayerWeights."""
        import torch

        self._hold(name, torch.from_numpy(values).bfloat16())

    def scale_columns(self, name: str, factors: Float32) -> None:
        """See LayerWeights. The scaled values would take twice the bytes."""
        self._scale(name, lambda values, rows: np.multiply(values, factors, out=values))

    def scale_rows(self, name: str, divisors: npt.NDArray[np.float64]) -> None:
        """See LayerWeights."""
        self._scale(name, lambda values, rows: np.divide(values, divisors[rows, None], values, casting="same_kind"))

    def shape(self, name: str) -> tuple[int, ...]:
        """See LayerWeights."""
        return tuple(self._matrices[name].shape) if name in self._matrices else super().shape(name)

    def rows(self, name: str, rows: slice) -> Float32:
        """See LayerWeights."""
        if name not in self._matrices:
            return super().rows(name, rows)
        matrix, scales = self._matrices[name], self._scales.get(name, [])
        values: Float32 = matrix[rows].float().numpy()
        if scales and matrix.element_size() == values.itemsize:  # the matrix itself
            values = values.copy()
        for scale in scales:
            scale(values, rows)
        return values

    def __getitem__(self, name: str) -> Float32:
        return self.rows(name, slice(None)) if name in self._matrices else super().__getitem__(name)

    def __setitem__(self, name: str, values: Float32) -> None:
        if values.ndim == 1:
            super().__setitem__(name, values)
            return
        self._hold(name, _compact(values))

    def __delitem__(self, name: str) -> None:
        if self._matrices.pop(name, None) is None:
            super().__delitem__(name)
        self._halves.pop(name, None)
        self._scales.pop(name, None)

    def _hold(self, name: str, matrix: Tensor) -> None:
        with self._lock:
            self._matrices[name] = matrix
            self._halves.pop(name, None)
            self._scales.pop(name, None)

    def _scale(self, name: str, scale: Scale) -> None:
        with self._lock:
            self._scales.setdefault(name, []).append(scale)
            self._halves.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._matrices

    def __len__(self) -> int:
        return super().__len__() + len(self._matrices)


def _compact(values: Float32) -> Tensor:
    import torch

    whole = torch.from_numpy(values)
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in whole.split(256)):
            return whole.to(dtype)
    return whole


class WindowWeights(Mapping[str, "Tensor"]):
    """By name, as torch has them, without a copy of those that are float32."""

    def __init__(self, weights: Mapping[str, Float32]) -> None:
        self._weights = weights

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """``x`` [num_tokens, in] times the weight [out, in]: float32 [num_tokens, out]."""
        from torch.nn import functional

        if isinstance(self._weights, Bfloat16Weights):
            return functional.linear(x.bfloat16(), self._weights.bfloat16(name)).float()
        return functional.linear(x, self[name])

    def forget_copies(self) -> None:
        """Of weights; those that are multiplied with again are made again."""
        if isinstance(self._weights, Bfloat16Weights):
            self._weights.forget_copies()

    def __getitem__(self, name: str) -> Tensor:
        import torch

        return torch.from_numpy(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
