"""Device memory of a rank's inputs and outputs. Addresses never change: CUDA graphs have them recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy.typing as npt

from builder.targets.tensorrt.runtime.gpu import Device
from builder.targets.tensorrt.runtime.tensors import TensorInfo
from plansmith_errors import EngineError


class Buffers:
    """Buffers by tensor name, shared by the plans of both modes, which have the same tensors."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._addresses: dict[str, int] = {}
        self._capacities: dict[str, int] = {}

    def reserve(self, tensors: Iterable[TensorInfo], largest: Mapping[str, tuple[int, ...]]) -> None:
        """A buffer for each of ``tensors`` at its ``largest`` shape, and the most that any plan asks for."""
        sizes: dict[str, int] = {}
        for tensor in tensors:
            shape = largest.get(tensor.name, tensor.largest)
            if min(shape, default=1) < 0:
                raise EngineError(f"the plan's tensor {tensor.name} has no largest size; build the engine again")
            sizes[tensor.name] = max(sizes.get(tensor.name, 0), tensor.num_bytes(shape))
        for name, size in sizes.items():
            if size > self._capacities.get(name, -1):
                self.release(name)
                self._addresses[name], self._capacities[name] = self._device.allocate(size), size

    def alias(self, name: str, of: str) -> None:
        """An output that is written in place."""
        self._addresses[name], self._capacities[name] = self._addresses[of], self._capacities[of]

    def release(self, name: str) -> None:
        if name in self._addresses:
            self._device.free(self._addresses.pop(name))

    def upload(self, name: str, values: npt.NDArray[Any]) -> None:
        """Raises EngineError for more than there is room for: TensorRT would read past the end."""
        if values.nbytes > self._capacities[name]:
            raise EngineError(
                f"{name} of shape {list(values.shape)} is {values.nbytes} bytes; the engine was built for "
                f"{self._capacities[name]}: build it with larger limits"
            )
        self._device.upload(self._addresses[name], values)

    def zero(self, name: str) -> None:
        self._device.zero(self._addresses[name], self._capacities[name])

    def address(self, name: str) -> int:
        return self._addresses[name]

    def __contains__(self, name: str) -> bool:
        return name in self._addresses


def pool_shape(tensor: TensorInfo, num_blocks: int) -> tuple[int, ...]:
    return (num_blocks, *tensor.shape[1:])


def bytes_per_block(tensors: Iterable[TensorInfo]) -> int:
    """Of all the pools among ``tensors``."""
    return sum(-(-prod(tensor.shape[1:]) * tensor.bits // 8) for tensor in tensors if tensor.is_pool)
