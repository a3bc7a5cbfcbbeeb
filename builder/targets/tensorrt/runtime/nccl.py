"""Ranks that reach each other through NCCL (nccl4py: https://docs.nvidia.com/deeplearning/nccl/user-guide)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from plansmith_errors import EngineError


@dataclass(frozen=True)
class _DeviceBytes:
    """Memory of the GPU as NCCL's bindings take it: the CUDA array interface, version 3."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class NcclCommunicator:
    """Implements Communicator: one for the world, and one for each tensor-parallel group within it."""

    def __init__(self, unique_id: bytes, rank: int, tp_size: int, world_size: int) -> None:
        nccl = load_nccl()
        self._world = nccl.Communicator.init(world_size, rank, nccl.UniqueId.from_bytes(unique_id))
        self._group = None if tp_size == 1 else self._world.split(color=rank // tp_size, key=rank % tp_size)

    def send(self, address: int, num_bytes: int, peer: int, stream: int) -> None:
        self._world.send(_DeviceBytes(address, num_bytes), peer, stream=stream)

    def receive(self, address: int, num_bytes: int, peer: int, stream: int) -> None:
        self._world.recv(_DeviceBytes(address, num_bytes), peer, stream=stream)

    @property
    def tensor_parallel(self) -> Any:
        return None if self._group is None else _capsule(self._group.ptr)

    def close(self) -> None:
        for communicator in (self._group, self._world):
            if communicator is not None:
                communicator.abort()  # unlike destroy it waits for no rank that may be gone


def new_unique_id() -> bytes:
    """Made by one rank and handed to all."""
    return bytes(load_nccl().get_unique_id())


def load_nccl() -> Any:
    try:
        import nccl.core
    except ImportError:
        raise EngineError(
            "an engine of several GPUs needs nccl4py, which is not installed; run: pip install 'plansmith[gpu]'"
        ) from None
    return nccl.core


def _capsule(pointer: int) -> Any:
    """TensorRT's bindings take the address of an ncclComm as a PyCapsule; its name is not looked at."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, None, None)
