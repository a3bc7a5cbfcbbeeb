"""Engine directories of GPU targets with everything but real plans, and machines to load them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.gpu_manifest import Footprint, GpuEngine, PlanRecord, RankRecord, ShapeRange
from builder.machine import Gpu, Machine
from builder.manifest import EngineManifest, KvCache, Limits, Source, describe_file, write_manifest

GIB = 1 << 30
VERSION = {"tensorrt-rtx": "1.7.1.116", "tensorrt": "11.4.0.106"}
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}


def write_gpu_engine(path: Path, *, target: str = "tensorrt-rtx", weights_bytes: int = GIB, **gpu: Any) -> Path:
    """An engine for sm89 on one GPU unless ``gpu``, fields of its part of the manifest, says otherwise."""
    path.mkdir()
    part = gpu_part(path, weights_bytes=weights_bytes, **gpu)
    manifest = EngineManifest(
        plansmith_version="1.2.3",
        target=target,
        library={target: VERSION[target]},
        precision=None,
        compile_properties={},
        limits=Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=256, vocab_size=96),
        kv_cache=KvCache(dtype="float16", tokens_per_block=64, bytes_per_block=1 << 16),
        model=MODEL,
        weights={"int4": "int4"},
        source=Source(files={"model.safetensors": "0" * 64}, quantization=None),
        files={file.name: describe_file(file) for file in sorted(path.iterdir())},
        gpu=part,
    )
    write_manifest(path, manifest)
    return path


def gpu_part(path: Path, *, weights_bytes: int = GIB, **gpu: Any) -> GpuEngine:
    """The manifest's part for GPUs, and files in the place of its plans."""
    tp_size, pp_size = gpu.get("tp_size", 1), gpu.get("pp_size", 1)
    ranks = tuple(rank_record(path, rank, 4 // pp_size, weights_bytes) for rank in range(tp_size * pp_size))
    fields = {"sms": (89,), "dtype": "float16", "tp_size": 1, "pp_size": 1, "ep_size": 1, "weights": "embedded", **gpu}
    return GpuEngine(ranks=ranks, **fields)


def rank_record(path: Path, rank: int, num_layers: int, weights_bytes: int = GIB) -> RankRecord:
    """One rank's, and a file in the place of its plan."""
    plan = path / f"rank{rank}.plan"
    plan.write_bytes(f"plan of rank {rank}".encode() * 100)
    return RankRecord(
        rank=rank,
        first_layer=0,
        num_layers=num_layers,
        plans=(
            PlanRecord(
                file=plan.name,
                modes=("mixed", "decode"),
                footprint=Footprint(weights_bytes=weights_bytes, activation_bytes=1 << 20, scratch_bytes=None),
                profiles={
                    "mixed": {"block_tables": ShapeRange(min=(1, 1), opt=(1, 8), max=(4, 4))},
                    "decode": {"input_ids": ShapeRange(min=(1,), opt=(4,), max=(4,))},
                },
                layers={"ATTENTION": num_layers},
                build_seconds=1.0,
            ),
        ),
        weight_files=(),
        constants={"int4": 1 << 20},
        kv_bytes_per_block=1 << 16,
        other_seconds=0.1,
        peak_rss_bytes=None,
    )


def machine_with(*sms: int, memory_bytes: int = 24 * GIB, **fields: Any) -> Machine:
    """A machine with GPUs of these compute capabilities and every library that engines here are built for."""
    gpus = tuple(Gpu(index=index, name=f"GPU-{sm}", sm=sm, memory_bytes=memory_bytes) for index, sm in enumerate(sms))
    given = {
        "libraries": {**VERSION, "cuda-bindings": "13.5.0", "nccl4py": "0.6"},
        "library_cuda": dict.fromkeys(VERSION, 13),
        "cuda_version": (13, 0),
        "driver_version": "580.65.06",
        "why_no_gpu": None if sms else "libcuda.so.1, the CUDA driver, is not installed",
    }
    return Machine(gpus=gpus, **{**given, **fields})
