"""Plans that are there already, for other weights of the same shape: nothing is compiled, the weights are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from builder.build_job import BuildJob
from builder.compatibility import check_gpu_files
from builder.gpu_manifest import GpuEngine, RankRecord
from builder.manifest import EngineManifest, read_manifest
from builder.model_spec import ModelSpec
from plansmith_errors import BuildError, EngineError
from quantize.safetensors_file import SafetensorsFile


def read_plans(plans: Path, job: BuildJob, sms: Sequence[int]) -> GpuEngine:
    """The part for GPUs of the engine in ``plans``. Raises BuildError where its plans are not those of ``job``."""
    try:
        manifest = read_manifest(plans)
        gpu = check_gpu_files(plans, manifest)
    except EngineError as error:
        raise BuildError(str(error)) from None
    for what, found, wanted in _differences(manifest, gpu, job, sms):
        if found != wanted:
            raise BuildError(
                f"{plans}: its plans have {what} {found}, this build asks for {wanted}; build without them"
            )
    if ModelSpec.from_hf_config(manifest.model) != job.spec:
        raise BuildError(
            f"{plans}: its plans are of another architecture than {job.checkpoint.path}; build without them"
        )
    return gpu


def take_plans(plans: Path, record: RankRecord, output: Path) -> None:
    """Plans never change, so they need not exist twice. Raises BuildError where the new weights do not fit them."""
    for name in record.weight_files:
        if _inputs(plans / name) != _inputs(output / name):
            raise BuildError(f"{plans}: its plans take weights of other schemes or shapes; build without them")
    for plan in record.plans:
        try:
            os.link((plans / plan.file).resolve(), output / plan.file)
        except OSError:
            shutil.copyfile(plans / plan.file, output / plan.file)


def _differences(
    manifest: EngineManifest, gpu: GpuEngine, job: BuildJob, sms: Sequence[int]
) -> list[tuple[str, object, object]]:
    options, limits = job.options, manifest.limits
    return [
        ("weights", gpu.weights, options.resolved_weights),
        ("target", manifest.target, options.target),
        ("libraries", manifest.library, {name: job.versions.get(name) for name in manifest.library}),
        ("sms", list(gpu.sms), list(sms)),
        ("dtype", gpu.dtype, options.resolved_dtype),
        ("sizes", gpu.parallelism, options.parallelism),
        ("max_batch_size", limits.max_batch_size, options.max_batch_size),
        ("max_num_tokens", limits.max_num_tokens, options.max_num_tokens),
        ("max_seq_len", limits.max_seq_len, job.max_seq_len),
        ("tokens_per_block", manifest.kv_cache.tokens_per_block, options.resolved_tokens_per_block),
        ("kv_cache_dtype", manifest.kv_cache.dtype, kv_cache_type(job)),
    ]


def kv_cache_type(job: BuildJob) -> str:
    kind = job.options.resolved_kv_cache_dtype
    return job.options.resolved_dtype if kind == "auto" else kind


def _inputs(file: Path) -> dict[str, tuple[object, tuple[int, ...]]]:
    return {name: (info.dtype, tuple(info.shape)) for name, info in SafetensorsFile(file).tensors.items()}
