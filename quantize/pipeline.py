"""Quantize a checkpoint: row by row through all processors, straight into the output files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.plan import PlannedTensor, plan_tensors, split_shards
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe
from quantize.report import QuantizeReport, TensorReport
from quantize.rounding import RoundedRows, round_fp8, round_int4, round_int8
from quantize.safetensors_checkpoint import INDEX_NAME
from quantize.safetensors_writer import SafetensorsWriter, TensorSlot, TensorSpec

MAX_SHARD_BYTES = 4 * 2**30
_CHUNK_VALUES = 2**17  # of one task: its float32 arrays stay in a core's second-level cache

Progress = Callable[[int, int, str], None]
"""Called after each tensor with how many are done, how many there are, and its name."""


def quantize_checkpoint(
    source: Path,
    output: Path,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizeReport:
    """Write the quantized checkpoint of ``source`` into ``output``, a new or empty directory.

    The caller owns atomicity; config.json is written last, so a directory without it was not finished. The same
    input gives the same bytes. Working memory is bounded, whatever the model's size. Raises CheckpointError for the
    source and QuantizeError for the recipe, the values (NaN, infinity) and the output.
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(source)
    planned = plan_tensors(checkpoint, recipe)
    _prepare_output(output, sum(tensor.nbytes for tensor in planned))
    side_files = checkpoint.side_files()
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        # Hashing runs beside the work; both read the same pages.
        hashes = [pool.submit(_sha256, path) for path in checkpoint.source_files()]
        try:
            tensors = _write_weights(checkpoint, planned, output, max_shard_bytes, pool, progress)
        except OSError as error:
            raise QuantizeError(f"{output}: cannot be written: {error.strerror}") from None
        sources = {path.name: future.result() for path, future in zip(checkpoint.source_files(), hashes, strict=True)}
    for name, data in side_files.items():
        (output / name).write_bytes(data)
    config = _config(checkpoint, recipe, tensors, sources)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return QuantizeReport(recipe.name, checkpoint.origin, tuple(tensors), time.perf_counter() - start)


def _prepare_output(output: Path, needed: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise QuantizeError(f"{output}: is not empty; give a new directory")
    free = shutil.disk_usage(output).free
    if free < needed:
        raise QuantizeError(f"{output}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def _write_weights(
    checkpoint: Checkpoint,
    planned: list[PlannedTensor],
    output: Path,
    max_shard_bytes: int,
    pool: ThreadPoolExecutor,
    progress: Progress | None,
) -> list[TensorReport]:
    shards = split_shards(planned, max_shard_bytes)
    reports: list[TensorReport] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with SafetensorsWriter(output / file_name, [spec for tensor in shard for spec in tensor.specs]) as writer:
            for tensor in shard:
                reports.append(_TensorJob(checkpoint, tensor, writer, pool).run())
                weight_map |= {spec.name: file_name for spec in tensor.specs}
                if progress is not None:
                    progress(len(reports), len(planned), tensor.info.name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(report.bytes_out for report in reports)}, "weight_map": weight_map}
        (output / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return reports


@dataclass(frozen=True)
class _ChunkResult:
    scales: npt.NDArray[Any] | None
    zero_points: npt.NDArray[np.uint8] | None
    squared_norm: float
    squared_error: float


@dataclass(frozen=True)
class _TensorJob:
    """One tensor: its rows in chunks on the pool, then its scales."""

    checkpoint: Checkpoint
    planned: PlannedTensor
    writer: SafetensorsWriter
    pool: ThreadPoolExecutor

    def run(self) -> TensorReport:
        specs = self.planned.specs
        slot = self.writer.add(specs[0])
        stored: list[npt.NDArray[Any]] = []
        results = self._round_all(slot, np.float16)
        if results is None:
            results = self._round_all(slot, np.float32) or []
        if results[0].scales is not None:
            stored.append(np.concatenate([result.scales for result in results if result.scales is not None]))
        if results[0].zero_points is not None:
            stored.append(np.concatenate([result.zero_points for result in results if result.zero_points is not None]))
        for spec, array in zip(specs[1:], stored, strict=True):
            self.writer.add(TensorSpec(spec.name, array.dtype, array.shape)).write_rows(0, array)
        return self._report(results, specs[0].nbytes + sum(array.nbytes for array in stored))

    def _round_all(self, slot: TensorSlot, scale_dtype: npt.DTypeLike) -> list[_ChunkResult] | None:
        """None when int4 scales do not fit ``scale_dtype``; values already written are then written again."""
        num_rows = self.planned.info.shape[0]
        row_values = self.planned.info.shape[1] if len(self.planned.info.shape) > 1 else 1
        step = max(1, _CHUNK_VALUES // row_values)
        results = list(
            self.pool.map(lambda begin: self._round_chunk(slot, begin, step, scale_dtype), range(0, num_rows, step))
        )
        complete = [result for result in results if result is not None]
        return complete if len(complete) == len(results) else None

    def _round_chunk(self, slot: TensorSlot, begin: int, step: int, scale_dtype: npt.DTypeLike) -> _ChunkResult | None:
        info = self.planned.info
        source = self.checkpoint.load_rows(info.name, begin, min(begin + step, info.shape[0]))
        rows = source.astype(np.float32, copy=False)
        self._check_finite(rows, begin, "is not finite; the source is damaged")
        norm = float(np.square(rows, dtype=np.float64).sum())
        if self.planned.scheme == "none":
            kept = source.astype(slot.spec.dtype, copy=False)
            self._check_finite(kept, begin, f"does not fit {slot.spec.dtype.name}; change keep_dtype")
            error = np.square(kept.astype(np.float64) - source).sum() if kept.dtype != source.dtype else 0.0
            slot.write_rows(begin, kept)
            return _ChunkResult(None, None, norm, float(error))
        rounded = _round(rows, self.planned, scale_dtype)
        if rounded is None:
            return None
        slot.write_rows(begin, rounded.values)
        return _ChunkResult(rounded.scales, rounded.zero_points, norm, rounded.squared_error)

    def _check_finite(self, rows: npt.NDArray[Any], begin: int, problem: str) -> None:
        finite = np.isfinite(rows)
        if not finite.all():
            row = begin + int(np.argwhere(~finite)[0][0])
            raise QuantizeError(f"tensor {self.planned.info.name!r}: a value in row {row} {problem}")

    def _report(self, results: Iterable[_ChunkResult], bytes_out: int) -> TensorReport:
        info, int4 = self.planned.info, self.planned.int4
        return TensorReport(
            name=info.name,
            scheme=self.planned.scheme,
            shape=info.shape,
            group_size=int4.group_size if int4 else None,
            symmetric=int4 is None or int4.symmetric,
            bytes_in=info.nbytes,
            bytes_out=bytes_out,
            squared_norm=sum(result.squared_norm for result in results),
            squared_error=sum(result.squared_error for result in results),
        )


def _round(rows: npt.NDArray[np.float32], planned: PlannedTensor, scale_dtype: npt.DTypeLike) -> RoundedRows | None:
    if planned.int4 is not None:
        int4 = planned.int4
        return round_int4(rows, int4.group_size, symmetric=int4.symmetric, scale=int4.scale, scale_dtype=scale_dtype)
    return round_fp8(rows) if planned.scheme == "fp8" else round_int8(rows)


def _config(
    checkpoint: Checkpoint, recipe: Recipe, tensors: list[TensorReport], sources: dict[str, str]
) -> dict[str, Any]:
    """The source's config.json with ``quantization_config`` added."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    return {
        **checkpoint.config,
        "tie_word_embeddings": checkpoint.is_tied,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "recipe": recipe.model_dump(mode="json", exclude_none=True),
            "source": {"origin": checkpoint.origin, "sha256": sources},
            "tensors": {tensor.name: _entry(tensor) for tensor in matrices},
        },
    }


def _entry(tensor: TensorReport) -> dict[str, Any]:
    entry: dict[str, Any] = {"scheme": tensor.scheme}
    if tensor.scheme == "int4":
        entry["group_size"] = tensor.group_size
    entry["symmetric"] = tensor.symmetric
    entry["bits_per_weight"] = round(tensor.bits_per_weight, 4)
    # Six digits: the order in which processors of different widths add would show in the rest.
    entry["relative_error"] = float(f"{tensor.relative_error:.6g}")
    return entry


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_of(file)


def _sha256_of(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()
