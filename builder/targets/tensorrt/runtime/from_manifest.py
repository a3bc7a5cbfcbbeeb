"""The layout of an engine directory, from its manifest."""

from __future__ import annotations

from pathlib import Path

from builder.compatibility import suitable_gpus
from builder.gpu_manifest import GpuEngine
from builder.machine import Machine
from builder.manifest import EngineManifest
from builder.model_spec import ModelSpec
from builder.targets.tensorrt.runtime.layout import EngineLayout, PlanFile


def engine_layout(path: Path, manifest: EngineManifest, gpu: GpuEngine, machine: Machine) -> EngineLayout:
    """Of the engine in ``path``, whose part for GPUs is ``gpu``, on ``machine``, which has been found to fit."""
    devices = suitable_gpus(gpu, machine)
    ranks = sorted(gpu.ranks, key=lambda record: record.rank)
    return EngineLayout(
        target=manifest.target,
        directory=str(path),
        plans=tuple(tuple(PlanFile(plan.file, plan.modes) for plan in record.plans) for record in ranks),
        weights=tuple(record.weight_files for record in ranks),
        devices=tuple(device.index for device in devices[: gpu.parallelism.world_size]),
        parallelism=gpu.parallelism,
        max_batch_size=manifest.limits.max_batch_size,
        max_num_tokens=manifest.limits.max_num_tokens,
        max_seq_len=manifest.limits.max_seq_len,
        tokens_per_block=manifest.kv_cache.tokens_per_block,
        vocab_size=manifest.limits.vocab_size,
        hidden_size=ModelSpec.from_hf_config(manifest.model).hidden_size,
    )
