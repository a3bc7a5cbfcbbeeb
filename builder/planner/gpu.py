"""The GPUs that can be planned for: memory, bandwidth and dense throughput of each, from ``gpus.yaml``."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from plansmith_errors import ConfigError
from quantize.yaml_model import read_yaml, validate

_CATALOGUE = Path(__file__).parent / "gpus.yaml"
MathFormat = Literal["fp16", "bf16", "fp8", "int8", "fp4"]


class Gpu(BaseModel):
    """One row of the catalogue; units as its head says. Rates of an engine's arithmetic are the properties below."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    sm: int
    memory_mib: int = Field(gt=0)
    memory_source: str | None = None
    bandwidth: float = Field(gt=0)
    tflops: dict[MathFormat, float]
    nvlink: float | None = None
    nvlink_gpus: int = Field(default=1, ge=1)
    pcie: float = Field(gt=0)
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def bytes_per_second(self) -> float:
        """Of the memory."""
        return self.bandwidth * 1e9

    def flops(self, math: MathFormat) -> float:
        """Dense operations per second in ``math``; in 16 bits where the tensor cores do not have the format."""
        return 1e12 * self.tflops.get(math, self.tflops["fp16"])

    def link_bytes_per_second(self, num_gpus: int) -> float:
        """In one direction, between the GPUs of a group of ``num_gpus``: NVLink where it joins them all, else PCIe."""
        both = self.nvlink if self.nvlink is not None and num_gpus <= self.nvlink_gpus else self.pcie
        return both / 2 * 1e9

    def link_name(self, num_gpus: int) -> str:
        return "NVLink" if self.nvlink is not None and num_gpus <= self.nvlink_gpus else "PCIe"


class _Catalogue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: tuple[Gpu, ...]


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Every GPU that can be planned for, in the order of the file."""
    return validate(_Catalogue, read_yaml(_CATALOGUE), str(_CATALOGUE)).gpus


def find_gpu(name: str) -> Gpu:
    """By name or alias, in any case. Raises ConfigError with the nearest names."""
    wanted = name.strip().lower().removeprefix("nvidia-").replace("_", "-").replace(" ", "-").replace("gb", "g")
    names = {label.replace("gb", "g"): gpu for gpu in catalogue() for label in (gpu.name, *gpu.aliases)}
    if wanted in names:
        return names[wanted]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    known = list(dict.fromkeys(names[label].name for label in near)) or [gpu.name for gpu in catalogue()]
    raise ConfigError(f"--gpu {name!r} is unknown; {'nearest' if near else 'known'}: {', '.join(known)}")
