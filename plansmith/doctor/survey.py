"""The survey: everything a build may want of a machine, looked up without importing what is heavy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from builder.machine import HostMemory, Machine, host_memory, this_machine
from builder.targets.facts import TARGETS, distribution_version
from plansmith.doctor.abilities import SmAbility, TargetAbility, sm_abilities, target_abilities
from plansmith.version import __version__
from plansmith_errors import ServeError

_OLDEST_PYTHON, _FIRST_TOO_NEW_PYTHON = (3, 10), (3, 13)


@dataclass(frozen=True)
class Library:
    name: str
    version: str | None
    use: str
    install: str


@dataclass(frozen=True)
class TritonServer:
    executable: str | None
    problem: str | None


@dataclass(frozen=True)
class Survey:
    plansmith: str
    python: str
    python_is_supported: bool
    system: str
    num_cpus: int
    memory: HostMemory | None
    disk_free_bytes: int  # where the command runs
    has_native_kernels: bool
    libraries: tuple[Library, ...]
    triton: TritonServer
    machine: Machine
    targets: tuple[TargetAbility, ...]
    sms: tuple[SmAbility, ...]


# What it is for, what to give to pip.
_LIBRARIES = (
    ("torch", "calibration, the float32 reference", "plansmith[quantize]"),
    ("transformers", "calibration", "plansmith[quantize]"),
    ("cuda-bindings", "running plans", "plansmith[gpu]"),
    ("nccl4py", "running plans on several GPUs", "plansmith[gpu]"),
    ("nvidia-ml-py", "free GPU memory", "nvidia-ml-py"),
    ("ray", "building ranks on many machines", "plansmith[ray]"),
    ("tritonclient", "model repositories", "plansmith[serve]"),
    ("nvidia-pytriton", "a Triton server without a container", "plansmith[serve]"),
)


def survey() -> Survey:
    """Look at this machine. Nothing is written, and nothing is allocated on a GPU."""
    machine, triton = this_machine(), _triton()
    return Survey(
        plansmith=__version__,
        python=platform.python_version(),
        python_is_supported=_OLDEST_PYTHON <= sys.version_info[:2] < _FIRST_TOO_NEW_PYTHON,
        system=f"{platform.system()} {platform.machine()}",
        num_cpus=os.cpu_count() or 1,
        memory=host_memory(),
        disk_free_bytes=shutil.disk_usage(Path()).free,
        has_native_kernels=_has_native_kernels(),
        libraries=(
            *_engine_libraries(machine),
            *(Library(name, distribution_version(name), *what) for name, *what in _LIBRARIES),
        ),
        triton=triton,
        machine=machine,
        targets=target_abilities(machine, triton.problem),
        sms=sm_abilities(machine),
    )


def _engine_libraries(machine: Machine) -> list[Library]:
    return [
        Library(facts.library, machine.libraries.get(facts.library), f"engines of target {name}", facts.install)
        for name, facts in TARGETS.items()
    ]


def _has_native_kernels() -> bool:
    from quantize.native.library import native_library

    return native_library() is not None


def _triton() -> TritonServer:
    from triton_repo.server.locate import locate_server

    try:
        return TritonServer(str(locate_server().executable), None)
    except ServeError as error:
        return TritonServer(None, str(error))
