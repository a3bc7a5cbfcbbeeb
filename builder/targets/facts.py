"""What is known of each target before any of its libraries is imported: names, how to install it, GPUs it serves."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

TargetName = Literal["cpu", "tensorrt-rtx", "tensorrt"]

SM_NAMES = {
    75: "T4, RTX 20",
    80: "A100, A30",
    86: "A10, A40, RTX 30",
    89: "L4, L40S, RTX 40",
    90: "H100, H200, GH200",
    100: "B200, GB200",
    103: "B300, GB300",
    110: "Thor",
    120: "RTX PRO 6000, RTX 50",
    121: "GB10 (DGX Spark)",
}
"""Compute capabilities of GPUs that a target may serve, and some that have them (developer.nvidia.com/cuda-gpus)."""


@dataclass(frozen=True)
class TargetFacts:
    name: TargetName
    label: str  # of the library, for readers
    library: str  # its name in manifests and for pip
    module: str
    install: str  # what to give to pip
    sms: tuple[int, ...]  # compute capabilities that it compiles for; none: it runs on no GPU
    is_ahead_of_time: bool  # compiles for GPUs that are not in the machine

    @property
    def is_gpu(self) -> bool:
        return bool(self.sms)


TARGETS: dict[str, TargetFacts] = {
    facts.name: facts
    for facts in (
        TargetFacts("cpu", "OpenVINO", "openvino", "openvino", "plansmith[cpu]", (), True),
        # 90, 100, 103 and 110 are refused by the library itself.
        TargetFacts(
            "tensorrt-rtx",
            "TensorRT-RTX",
            "tensorrt-rtx",
            "tensorrt_rtx",
            "plansmith[tensorrt-rtx]",
            (75, 80, 86, 89, 120, 121),
            True,
        ),
        TargetFacts("tensorrt", "TensorRT", "tensorrt", "tensorrt", "tensorrt>=11", tuple(SM_NAMES), False),
    )
}


RUN_TIME = ("cuda-bindings", "nccl4py")
"""Distributions that running plans needs beside the target's library; the second for several GPUs."""


def library_version(target: TargetName) -> str | None:
    """Exact version of the target's library, as "2026.4.1" or "1.7.1.116"; None where it cannot be imported."""
    try:
        module = importlib.import_module(TARGETS[target].module)
    except ImportError:
        return None
    version = getattr(module, "__version__", None)  # a folder named "tensorrt" can be imported, too
    return None if version is None else re.split(r"[-+]", str(version))[0]


def installed_cuda(library: str) -> int | None:
    """CUDA's major version of a library's wheel, which carries it in its name: tensorrt-rtx-cu13, tensorrt_cu12."""
    for major in (13, 12):
        if distribution_version(f"{library}-cu{major}") is not None:
            return major
    return None


def quick_library_version(target: TargetName) -> str | None:
    """As ``library_version``, without an import where the installation tells."""
    library = TARGETS[target].library
    names = (library, f"{library}-cu13", f"{library}-cu12")
    return next((found for name in names if (found := distribution_version(name))), None) or library_version(target)


def distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
