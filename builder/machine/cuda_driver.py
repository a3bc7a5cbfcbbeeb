"""The CUDA driver's view of the GPUs, through ctypes: no context is made, so no GPU memory is taken.

Entry points and attribute numbers: CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_TEXT_BYTES = 256


class CudaUnavailableError(Exception):
    """There is no driver, or it does not start; says why."""


@dataclass(frozen=True)
class CudaDevice:
    name: str
    sm: int
    memory_bytes: int
    pci_bus_id: str


@dataclass(frozen=True)
class CudaDriver:
    cuda_version: tuple[int, int]
    devices: tuple[CudaDevice, ...]


def query_driver(library: str | None = None) -> CudaDriver:
    """The visible devices. Raises CudaUnavailableError."""
    try:
        driver = _Driver(ctypes.CDLL(library or _LIBRARY))
    except OSError:
        raise CudaUnavailableError(f"{library or _LIBRARY}, the CUDA driver, is not installed") from None
    if not driver.start():
        return CudaDriver(driver.version(), ())
    return CudaDriver(driver.version(), tuple(driver.device(index) for index in range(driver.count())))


class _Driver:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def start(self) -> bool:
        """False where the driver works and there is no device."""
        result = self._library.cuInit(0)
        if result not in (0, _NO_DEVICE):
            raise CudaUnavailableError(f"the CUDA driver does not start: {self._error_text(result)}")
        return bool(result == 0)

    def version(self) -> tuple[int, int]:
        number = self._integer("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def count(self) -> int:
        return self._integer("cuDeviceGetCount")

    def device(self, index: int) -> CudaDevice:
        handle = self._integer("cuDeviceGet", index)
        major = self._integer("cuDeviceGetAttribute", _CAPABILITY_MAJOR, handle)
        minor = self._integer("cuDeviceGetAttribute", _CAPABILITY_MINOR, handle)
        memory = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        return CudaDevice(
            self._text("cuDeviceGetName", handle),
            major * 10 + minor,
            memory.value,
            self._text("cuDeviceGetPCIBusId", handle),
        )

    def _integer(self, function: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self._call(function, ctypes.byref(value), *arguments)
        return value.value

    def _text(self, function: str, handle: int) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, buffer, _TEXT_BYTES, handle)
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result:
            raise CudaUnavailableError(f"{function} of the CUDA driver failed: {self._error_text(result)}")

    def _error_text(self, result: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(result, ctypes.byref(text)) == 0
        return text.value.decode(errors="replace") if known and text.value else f"error {result}"
