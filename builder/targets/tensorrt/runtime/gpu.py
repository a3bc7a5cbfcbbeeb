"""What the run-time asks of a GPU and its libraries: the seam at which tests put a machine without one.

Engines and contexts have the names and results of TensorRT's own ``ICudaEngine`` and ``IExecutionContext``, of which
these protocols are the part that is used. Setters return False, not an exception, when TensorRT refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Mode = Literal["mixed", "decode"]


class ExecutionContext(Protocol):
    """TensorRT's IExecutionContext."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_communicator(self, communicator: Any) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class PlanEngine(Protocol):
    """TensorRT's ICudaEngine."""

    num_io_tensors: int

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Any: ...

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]: ...


class Device(Protocol):
    """One GPU's memory and one stream, on which everything is ordered. Addresses are bytes. Raises EngineError."""

    stream: int

    def allocate(self, num_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def free_bytes(self) -> int:
        """What can still be allocated."""
        ...

    def zero(self, address: int, num_bytes: int) -> None: ...

    def upload(self, address: int, values: npt.NDArray[Any]) -> None:
        """Copy to the device; ``values`` may be changed once this returns."""
        ...

    def download(self, values: npt.NDArray[Any], address: int) -> None:
        """Copy from the device; ``values`` are there after ``synchronize``."""
        ...

    def synchronize(self) -> None: ...

    def capture(self, work: Callable[[], None]) -> Any:
        """Record what ``work`` puts on the stream as a CUDA graph; nothing runs."""
        ...

    def launch(self, graph: Any) -> None: ...

    def close(self) -> None: ...


class Communicator(Protocol):
    """The ranks' way to each other. Raises EngineError."""

    def send(self, address: int, num_bytes: int, peer: int, stream: int) -> None:
        """To the rank ``peer`` of the world."""
        ...

    def receive(self, address: int, num_bytes: int, peer: int, stream: int) -> None: ...

    @property
    def tensor_parallel(self) -> Any:
        """What ``set_communicator`` takes: the ranks that hold parts of the same layers; None for one rank alone."""
        ...

    def close(self) -> None: ...


class Gpu(Protocol):
    """A GPU with the library that the plans were built for."""

    device: Device

    def deserialize(self, plan: Path) -> PlanEngine:
        """Raises EngineError with the library's reason."""
        ...

    def create_context(self, engine: PlanEngine, mode: Mode) -> ExecutionContext: ...

    @property
    def captures_graphs(self) -> bool:
        """Whether the library itself records and replays CUDA graphs, so that we need not."""
        ...

    def new_unique_id(self) -> bytes:
        """Made by one rank and handed to all, for ``join``."""
        ...

    def join(self, unique_id: bytes, rank: int, tp_size: int, world_size: int) -> Communicator:
        """All ranks call it with one ``unique_id`` and return when all are there."""
        ...


OpenGpu = Callable[[str, int], Gpu]
"""Called with the target ("tensorrt", "tensorrt-rtx") and the number of the GPU in this machine."""

Float32 = npt.NDArray[np.float32]
