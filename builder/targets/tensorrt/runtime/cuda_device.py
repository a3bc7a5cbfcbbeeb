"""A GPU through cuda-python (https://nvidia.github.io/cuda-python): memory, one stream, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import EngineError

_ALIGNMENT = 256  # of every address, in bytes; what cudaMalloc gives


class CudaDevice:
    """Implements Device. Uploads go through pinned memory, which the driver copies from without a hidden wait."""

    def __init__(self, number: int) -> None:
        self._runtime = _cuda_runtime()
        self._call("cudaSetDevice", number)
        self.stream = int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))
        self._staging: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}  # device address -> pinned address, its bytes
        self._allocated: set[int] = set()

    def allocate(self, num_bytes: int) -> int:
        address = int(self._call("cudaMalloc", max(num_bytes, _ALIGNMENT)))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        self._call("cudaFree", address)
        self._allocated.discard(address)

    def free_bytes(self) -> int:
        return int(self._call("cudaMemGetInfo")[0])

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, num_bytes, self.stream)

    def upload(self, address: int, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        pinned, staging = self._pinned(address, data.nbytes)
        staging[: data.nbytes] = data
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, pinned, data.nbytes, kind, self.stream)

    def download(self, values: npt.NDArray[Any], address: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", values.ctypes.data, address, values.nbytes, kind, self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> Any:
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        finally:  # a stream that is left in capture refuses all further work
            graph = self._call("cudaStreamEndCapture", self.stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return executable

    def launch(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self.stream)

    def close(self) -> None:
        for address in list(self._allocated):
            self.free(address)
        for pinned, _ in self._staging.values():
            self._call("cudaFreeHost", pinned)
        self._staging.clear()

    def _pinned(self, address: int, num_bytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """The buffer that belongs to ``address``: the step before was waited for, so it is free again."""
        found = self._staging.get(address)
        if found is None or found[1].size < num_bytes:
            if found is not None:
                self.synchronize()
                self._call("cudaFreeHost", found[0])
            pinned = int(self._call("cudaMallocHost", num_bytes))
            found = self._staging[address] = pinned, _bytes_at(pinned, num_bytes)
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        """One call of the run-time API, whose results begin with an error code."""
        error, *results = getattr(self._runtime, name)(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            reason = self._runtime.cudaGetErrorString(error)[1]
            text = reason.decode() if isinstance(reason, bytes) else str(reason)
            raise EngineError(f"{name} failed: {text}; see nvidia-smi for what else uses the GPU")
        return results[0] if len(results) == 1 else results


def _bytes_at(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _cuda_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        raise EngineError(
            "running a plan needs cuda-python, which is not installed; run: pip install 'plansmith[gpu]'"
        ) from None
    return runtime
