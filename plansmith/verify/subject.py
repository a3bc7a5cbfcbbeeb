"""What can be measured: an engine as it is shipped, or a checkpoint, which is compiled or run by the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import builder
import quantize
from builder.compatibility import check_target_runs
from builder.manifest import MANIFEST_NAME
from builder.network.weights import expected_weights
from builder.targets.facts import TARGETS
from plansmith.console import Console
from plansmith.version import __version__
from plugins.inflight_batching.step import StepEngine
from quantize import Checkpoint, StoredWeight


@dataclass(frozen=True)
class Subject:
    """A path that was looked at, but of which nothing is loaded yet."""

    path: Path
    manifest: builder.EngineManifest | None  # of an engine
    checkpoint: Checkpoint | None  # the other kind

    def options(self) -> builder.BuildOptions | None:
        """What the engine was built with, for a baseline like it; None for a checkpoint."""
        if self.manifest is None:
            return None
        limits, gpu = self.manifest.limits, self.manifest.gpu
        of_gpu = {} if gpu is None else gpu.model_dump(include={"dtype", "sms", "tp_size", "pp_size", "ep_size"})
        return builder.BuildOptions(
            target=TARGETS[self.manifest.target].name,
            precision=self.manifest.precision or "fast",
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            **of_gpu,
        )

    def weights(self) -> list[StoredWeight]:
        """What quantization made of each matrix; empty where it made nothing. Raises PlansmithError."""
        if self.checkpoint is not None:
            return quantize.checkpoint_weights(self.checkpoint)
        return [] if self.manifest is None else engine_weights(self.manifest, self.path)


def look_at(path: Path) -> Subject:
    """Raises CheckpointError or EngineError when ``path`` is neither an engine nor a checkpoint."""
    if (path / MANIFEST_NAME).is_file():
        return Subject(path, builder.read_manifest(path), None)
    return Subject(path, None, quantize.open_checkpoint(path))


def engine_weights(manifest: builder.EngineManifest, path: Path) -> list[StoredWeight]:
    """The matrices of the checkpoint that an engine was compiled from, as its manifest describes them."""
    shapes = expected_weights(builder.ModelSpec.from_hf_config(manifest.model))
    return quantize.described_weights(manifest.source.quantization, shapes, f"{path}: {MANIFEST_NAME}")


@contextmanager
def loaded(
    subject: Subject, options: builder.BuildOptions, *, reference: bool, console: Console
) -> Iterator[tuple[StepEngine, str]]:
    """Load an engine, or make one of a checkpoint: the float32 reference, or one compiled with ``options``.

    Yields it with a line that says what it is. What is compiled lies in the temporary directory (TMPDIR) meanwhile.
    """
    if subject.manifest is not None:
        with _closing(subject.path, subject.manifest) as engine:
            yield engine, f"{subject.path}: {subject.manifest.target} engine, precision {_precision(subject.manifest)}"
    elif reference:
        engine = builder.load_reference(subject.path, options)
        try:
            yield engine, f"{subject.path}: {_origin(subject)}, float32 reference"
        finally:
            engine.close()
    else:
        check_target_runs(options.target)
        with tempfile.TemporaryDirectory(prefix="plansmith-evaluate-") as folder:
            with console.progress("compile") as progress:
                manifest = builder.build_engine(
                    subject.path, Path(folder), options, plansmith_version=__version__, progress=progress
                )
            with _closing(Path(folder), manifest) as engine:
                yield (
                    engine,
                    f"{subject.path}: {_origin(subject)}, compiled for {manifest.target}, {_precision(manifest)}",
                )


@contextmanager
def _closing(path: Path, manifest: builder.EngineManifest) -> Iterator[StepEngine]:
    engine = builder.load_engine(path, num_blocks=_num_blocks(manifest))
    try:
        yield engine
    finally:
        engine.close()


def _num_blocks(manifest: builder.EngineManifest) -> int:
    """KV blocks for the longest sequence and for one full step: two engines are loaded, and neither serves."""
    limits, size = manifest.limits, manifest.kv_cache.tokens_per_block
    return max(-(-limits.max_seq_len // size), -(-limits.max_num_tokens // size) + limits.max_batch_size)


def _precision(manifest: builder.EngineManifest) -> str | None:
    return manifest.precision if manifest.gpu is None else manifest.gpu.dtype


def _origin(subject: Subject) -> str:
    return subject.checkpoint.origin if subject.checkpoint is not None else ""
