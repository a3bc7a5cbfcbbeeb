"""Build an engine from a checkpoint, and load one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from builder.build_check import require_library
from builder.build_job import BuildJob, Progress
from builder.compatibility import check_gpu_files, check_machine
from builder.file_hashes import FileHashes
from builder.manifest import (
    EngineManifest,
    FileEntry,
    Limits,
    Source,
    check_files,
    describe_file,
    read_manifest,
    write_manifest,
)
from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.options import BuildOptions
from builder.targets.built import BuiltModel
from builder.targets.facts import TARGETS, TargetName
from builder.targets.support import check_supported
from plansmith_errors import BuildError, EngineError

if TYPE_CHECKING:
    from plugins.inflight_batching.step import StepEngine

_log = logging.getLogger(__name__)
_HASH_BELOW = 64 << 20  # bytes; the weights of a large model are checked by size alone when it is loaded


def build_engine(
    checkpoint_dir: Path,
    output: Path,
    options: BuildOptions,
    *,
    plansmith_version: str,
    progress: Progress | None = None,
    plans: Path | None = None,
    resume_state: Path | None = None,
) -> EngineManifest:
    """Compile the checkpoint in ``checkpoint_dir`` into the empty directory ``output``.

    The caller owns atomicity; the manifest is written last. ``plans``: an engine with external weights of a model of
    the same shape, whose plans are used, so that nothing is compiled. With ``resume_state``, a directory that is there
    while ``output`` is to be kept, ``output`` may hold ranks of GPU targets that a stopped build finished.
    Raises BuildError and CheckpointError.
    """
    from quantize import open_checkpoint

    if not output.is_dir() or (resume_state is None and any(output.iterdir())):
        raise BuildError(f"{output}: expected a new, empty directory to build into")
    if plans is not None and not (TARGETS[options.target].is_gpu and options.resolved_weights == "external"):
        raise BuildError(f"plans of {plans} take external weights; set build.weights to external, on a GPU target")
    library = {TARGETS[options.target].library: require_library(options.target)}
    checkpoint = open_checkpoint(checkpoint_dir)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    check_supported(options.target, spec)
    weights = WeightSource(checkpoint, spec)
    max_seq_len = options.resolved_max_seq_len(spec)
    with FileHashes(checkpoint.source_files()) as source_hashes:  # reads while others compile
        job = BuildJob(
            checkpoint=checkpoint,
            source_hashes=source_hashes.result,
            spec=spec,
            weights=weights,
            output=output,
            options=options,
            max_seq_len=max_seq_len,
            versions={**library, "plansmith": plansmith_version},
            progress=progress or (lambda done, total, name: None),
            plans=plans,
            resume_state=resume_state,
        )
        built = _target_build(options.target)(job)
        source = Source(files=source_hashes.result(), quantization=checkpoint.config.get("quantization_config"))
    manifest = EngineManifest(
        plansmith_version=plansmith_version,
        target=options.target,
        library=library,
        precision=None if built.gpu else options.precision,
        compile_properties=built.compile_properties,
        limits=Limits(
            max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens,
            max_seq_len=max_seq_len,
            vocab_size=spec.vocab_size,
        ),
        kv_cache=built.kv_cache,
        model={key: value for key, value in checkpoint.config.items() if key != "quantization_config"},
        weights=built.weights,
        source=source,
        files={file.name: _entry(file, built.sha256.get(file.name)) for file in sorted(output.iterdir())},
        gpu=built.gpu,
    )
    write_manifest(output, manifest)
    return manifest


def load_engine(path: Path, *, num_blocks: int | None = None, num_threads: int | None = None) -> StepEngine:
    """Check the manifest of the engine in ``path`` against this machine, then load and compile it.

    ``num_blocks`` KV blocks are allocated; None makes room for a full batch within 1 GiB. ``num_threads`` None takes
    all cores. Raises EngineError before anything is allocated when version, files or format do not fit.
    """
    for name, value in (("num_blocks", num_blocks), ("num_threads", num_threads)):
        if value is not None and value < 1:
            raise EngineError(f"{name} is {value}; expected 1 or more")
    manifest = read_manifest(path)
    if manifest.gpu is not None or TARGETS.get(manifest.target, TARGETS["cpu"]).is_gpu:
        return _load_gpu(path, manifest, num_blocks, num_threads)
    check_machine(path, manifest)
    return _load_cpu(path, manifest, num_blocks, num_threads)


def _load_cpu(path: Path, manifest: EngineManifest, num_blocks: int | None, num_threads: int | None) -> StepEngine:
    from builder.targets.cpu.compiled import MODEL_BIN, MODEL_XML
    from builder.targets.cpu.engine import OpenVinoEngine

    check_files(path, manifest, required=(MODEL_XML, MODEL_BIN), hash_below=_HASH_BELOW)
    engine = OpenVinoEngine(path, manifest, num_blocks=num_blocks, num_threads=num_threads)
    _log.info("loaded %s: %d KV blocks of %d tokens", path, engine.limits.num_blocks, engine.limits.tokens_per_block)
    return engine


def _load_gpu(path: Path, manifest: EngineManifest, num_blocks: int | None, num_threads: int | None) -> StepEngine:
    from builder.targets.tensorrt.runtime.engine import TensorRtEngine
    from builder.targets.tensorrt.runtime.from_manifest import engine_layout

    if num_threads is not None:
        raise EngineError(f"num_threads is {num_threads}, but {path} runs on GPUs; leave it out")
    gpu = check_gpu_files(path, manifest)
    layout = engine_layout(path, manifest, gpu, check_machine(path, manifest))
    return TensorRtEngine(layout, num_blocks=num_blocks)


def load_reference(
    checkpoint_dir: Path, options: BuildOptions | None = None, *, num_blocks: int | None = None
) -> StepEngine:
    """Load a checkpoint, quantized or not, as an eager float32 engine. Raises EngineError where torch is missing."""
    from builder.targets.reference.engine import ReferenceEngine

    return ReferenceEngine(checkpoint_dir, options or BuildOptions(), num_blocks)


def _target_build(target: TargetName) -> Callable[[BuildJob], BuiltModel]:
    if TARGETS[target].is_gpu:
        from builder.targets.tensorrt.engine_build import build as build_gpu

        return build_gpu
    from builder.targets.cpu.build import build

    return build


def _entry(file: Path, sha256: str | None) -> FileEntry:
    return describe_file(file) if sha256 is None else FileEntry(bytes=file.stat().st_size, sha256=sha256)
