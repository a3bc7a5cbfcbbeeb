"""What only NVML tells without taking GPU memory: free memory and the driver's version (nvidia-ml-py, optional)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NvmlFacts:
    driver_version: str | None = None
    free_bytes: dict[str, int] = field(default_factory=dict)  # by PCI bus id


def query_nvml(pci_bus_ids: Iterable[str]) -> NvmlFacts:
    """Empty where nvidia-ml-py is not installed or NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return NvmlFacts()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NvmlFacts()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        free = {bus: memory for bus in pci_bus_ids if (memory := _free_bytes(pynvml, bus)) is not None}
        return NvmlFacts(version if isinstance(version, str) else version.decode(), free)
    except pynvml.NVMLError:
        return NvmlFacts()
    finally:
        pynvml.nvmlShutdown()


def _free_bytes(nvml: Any, pci_bus_id: str) -> int | None:
    """None for a GPU that NVML hides, such as a slice of one."""
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError:
        return None
