"""The weights of a layer as calibration has them at the moment, and as linears multiply them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Float32 = npt.NDArray[np.float32]

_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16: twice as fast as float32 and more."""
    import torch

    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _CAPABILITIES)


class Bfloat16Weights:
    """Copies of the weights of one layer, made when they are first multiplied with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[str, tuple[Float32, Tensor]] = {}

    def copy_of(self, name: str, values: Float32) -> Tensor:
        """Of ``values``, which is another array once the weight was rounded."""
        import torch

        with self._lock:
            copied = self._copies.get(name)
            if copied is None or copied[0] is not values:
                copied = self._copies[name] = values, torch.from_numpy(values).bfloat16()
        return copied[1]

    def clear(self) -> None:
        """Those that are multiplied with again are made again."""
        with self._lock:
            self._copies.clear()


class WindowWeights(Mapping[str, "Tensor"]):
    """By name, as torch has them, without a copy; ``halves`` None: linears multiply these, too."""

    def __init__(self, weights: Mapping[str, Float32], halves: Bfloat16Weights | None = None) -> None:
        self._weights = weights
        self._halves = halves

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """``x`` [num_tokens, in] times the weight [out, in]: float32 [num_tokens, out]."""
        from torch.nn import functional

        if self._halves is None:
            return functional.linear(x, self[name])
        return functional.linear(x.bfloat16(), self._halves.copy_of(name, self._weights[name])).float()

    def forget_copies(self) -> None:
        if self._halves is not None:
            self._halves.clear()

    def __getitem__(self, name: str) -> Tensor:
        import torch

        return torch.from_numpy(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
