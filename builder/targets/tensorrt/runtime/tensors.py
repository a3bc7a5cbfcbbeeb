"""The inputs and outputs of a plan, as the deserialized engine tells them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from builder.targets.tensorrt.runtime.gpu import PlanEngine
from plansmith_errors import EngineError

# Bits of an element by the end of the name of TensorRT's DataType.
_BITS = {
    "FLOAT": 32,
    "HALF": 16,
    "BF16": 16,
    "INT8": 8,
    "INT32": 32,
    "INT64": 64,
    "BOOL": 8,
    "UINT8": 8,
    "FP8": 8,
    "E8M0": 8,
    "INT4": 4,
    "FP4": 4,
}
POOLS = ("key_pool.", "value_pool.", "key_scale_pool.", "value_scale_pool.")


@dataclass(frozen=True)
class TensorInfo:
    name: str
    is_input: bool
    bits: int  # of an element
    shape: tuple[int, ...]  # -1: decided by each step
    largest: tuple[int, ...]  # of an input: the most its profile allows

    @property
    def is_pool(self) -> bool:
        return self.name.startswith(POOLS)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return -(-prod(shape) * self.bits // 8)


def read_tensors(engine: PlanEngine, profile: int) -> dict[str, TensorInfo]:
    """By name, for one of the plan's optimization profiles. Raises EngineError for a type that we cannot hold."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return {name: _describe(engine, name, profile) for name in names}


def _describe(engine: PlanEngine, name: str, profile: int) -> TensorInfo:
    is_input = str(engine.get_tensor_mode(name)).endswith("INPUT")
    dtype = str(engine.get_tensor_dtype(name)).rsplit(".", 1)[-1]
    if dtype not in _BITS:
        raise EngineError(f"the plan's tensor {name} has the type {dtype}, which is unknown; build the engine again")
    shape = tuple(engine.get_tensor_shape(name))
    largest = tuple(engine.get_tensor_profile_shape(name, profile)[2]) if is_input and -1 in shape else shape
    return TensorInfo(name, is_input, _BITS[dtype], shape, largest)
