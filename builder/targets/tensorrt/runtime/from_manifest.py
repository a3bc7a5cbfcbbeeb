"""The layout of an engine directory, from its manifest."""

from __future__ import annotations

from pathlib import Path

from builder.compatibility import suitable_gpus
from builder.machine import Machine, this_machine
from builder.manifest import EngineManifest
from builder.model_spec import ModelSpec
from builder.targets.tensorrt.runtime.layout import EngineLayout, PlanFile
from plansmith_errors import EngineError


def engine_layout(path: Path, manifest: EngineManifest, machine: Machine | None = None) -> EngineLayout:
    """Of the engine in ``path`` on ``machine`` (this one), which has been checked against each other."""
    gpu = manifest.gpu
    if gpu is None:
        raise EngineError(f"{path}: engine.json has no section gpu; build the engine again")
    devices = suitable_gpus(gpu, machine or this_machine())
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
