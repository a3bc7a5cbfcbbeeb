"""One machine's GPUs, driver and engine libraries, as plain data: of this machine, or of another that said so."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from builder.targets.facts import RUN_TIME, TARGETS, TargetName, distribution_version, installed_cuda, library_version

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Part):
    index: int = Field(ge=0)  # CUDA's order, after CUDA_VISIBLE_DEVICES
    name: str
    sm: int  # compute capability, 89 for 8.9
    memory_bytes: int = Field(ge=0)
    free_bytes: int | None = None  # None: not known without nvidia-ml-py


class Machine(_Part):
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str | None = None
    driver_version: str | None = None  # of the kernel module, as "580.65.06"
    cuda_version: tuple[int, int] | None = None  # the newest CUDA that the driver runs
    libraries: dict[str, str] = {}  # exact versions of what engines are run with, where it is installed
    library_cuda: dict[str, int] = {}  # CUDA's major version that those of GPU targets were built for

    @property
    def sms(self) -> tuple[int, ...]:
        return tuple(sorted({gpu.sm for gpu in self.gpus}))

    def describe_gpus(self) -> str:
        """ "2 x NVIDIA L4 (sm89)", or "no NVIDIA GPU (why)"."""
        if not self.gpus:
            return f"no NVIDIA GPU ({self.why_no_gpu or 'none is visible'})"
        kinds = [(gpu.name, gpu.sm) for gpu in self.gpus]
        return ", ".join(f"{kinds.count(kind)} x {kind[0]} (sm{kind[1]})" for kind in dict.fromkeys(kinds))


def this_machine(target: TargetName | None = None) -> Machine:
    """Ask the CUDA driver and NVML; nothing is allocated on a GPU. With ``target``, only what concerns it."""
    from builder.machine.cuda_driver import CudaUnavailableError, query_driver
    from builder.machine.nvml import query_nvml

    asked = [facts for facts in TARGETS.values() if target in (None, facts.name)]
    libraries = {facts.library: version for facts in asked if (version := library_version(facts.name))}
    if not any(facts.is_gpu for facts in asked):
        return Machine(libraries=libraries)
    libraries |= {name: version for name in RUN_TIME if (version := distribution_version(name))}
    library_cuda = {name: major for name in libraries if (major := installed_cuda(name)) is not None}
    try:
        driver = query_driver()
    except CudaUnavailableError as error:
        return Machine(why_no_gpu=str(error), libraries=libraries, library_cuda=library_cuda)
    nvml = query_nvml([device.pci_bus_id for device in driver.devices])
    gpus = tuple(
        Gpu(
            index=index,
            name=device.name,
            sm=device.sm,
            memory_bytes=device.memory_bytes,
            free_bytes=nvml.free_bytes.get(device.pci_bus_id),
        )
        for index, device in enumerate(driver.devices)
    )
    return Machine(
        gpus=gpus,
        why_no_gpu=None if gpus else "the CUDA driver shows none",
        driver_version=nvml.driver_version or kernel_module_version(),
        cuda_version=driver.cuda_version,
        libraries=libraries,
        library_cuda=library_cuda,
    )


def kernel_module_version(file: Path = _KERNEL_MODULE) -> str | None:
    """Version of the loaded NVIDIA kernel module, as "580.65.06"; None where there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        return None
    return found.group(1) if found else None
