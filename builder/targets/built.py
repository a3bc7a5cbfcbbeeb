"""What a target hands back when it has compiled a model into a directory."""

from __future__ import annotations

from dataclasses import dataclass, field

from builder.gpu_manifest import GpuEngine
from builder.manifest import KvCache


@dataclass(frozen=True)
class BuiltModel:
    kv_cache: KvCache
    weights: dict[str, str]  # scheme of the checkpoint -> how this target stores it
    compile_properties: dict[str, str] = field(default_factory=dict)
    gpu: GpuEngine | None = None
    sha256: dict[str, str] = field(default_factory=dict)  # of files whose writer knows it
