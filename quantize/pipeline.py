"""Quantize a checkpoint: row by row through all processors, straight into the output files."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from plansmith_errors import QuantizeError
from quantize.calibration.calibrator import Calibrator, in_layer_order
from quantize.calibration.runner import CalibrationTools
from quantize.calibration.start import Calibration
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.magnitudes import Magnitudes
from quantize.plan import PlannedTensor, plan_tensors, split_shards
from quantize.prepared_tensor import write_companions, write_prepared
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe
from quantize.report import QuantizeReport, TensorReport
from quantize.rotation.checkpoint import rotated
from quantize.safetensors_checkpoint import INDEX_NAME
from quantize.safetensors_writer import SafetensorsWriter
from quantize.tensor_job import TensorJob
from quantize.tokenizer_fit import check_tokenizer_fits

MAX_SHARD_BYTES = 4 * 2**30
_HASHED_BYTES = 8 * 2**20  # of a file that are mapped at a time

Progress = Callable[[int, int, str], None]
"""Called after each tensor with how many are done, how many there are, and its name."""


def quantize_checkpoint(
    source: Path,
    output: Path,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    calibration_tools: CalibrationTools | None = None,
) -> QuantizeReport:
    """Write the quantized checkpoint of ``source`` into ``output``, a new or empty directory.

    The caller owns atomicity; config.json is written last, so a directory without it was not finished. The same
    input gives the same bytes. Working memory is bounded, whatever the model's size. A recipe with a calibrated method
    needs ``calibration_tools``. Raises CheckpointError for the source and QuantizeError for the recipe, the values
    (NaN, infinity), the calibration text and the output.
    """
    start = time.perf_counter()
    checkpoint = rotated(open_checkpoint(source), recipe.rotations)
    planned = plan_tensors(checkpoint, recipe)
    check_tokenizer_fits(checkpoint)
    calibration = None
    if recipe.is_calibrated:
        planned = in_layer_order(planned)
        calibration = Calibration(checkpoint, planned, recipe, calibration_tools)
    side_files = checkpoint.side_files()
    try:
        _prepare_output(output, sum(tensor.nbytes for tensor in planned))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool, _Hasher(checkpoint, pool) as hasher:
            calibrator = calibration.start(output, pool) if calibration is not None else None
            with calibrator or nullcontext():
                tensors = _write_weights(checkpoint, planned, output, max_shard_bytes, pool, progress, calibrator)
            sources = hasher.results()
        for name, data in side_files.items():
            (output / name).write_bytes(data)
        config = _config(checkpoint, recipe, tensors, sources)
        if calibration is not None:
            config["quantization_config"]["calibration"] = calibration.record()
            calibration.coverage.warn()
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise QuantizeError(
            f"{error.filename or output}: {error.strerror}; the quantized checkpoint is incomplete"
        ) from None
    return QuantizeReport(recipe.name, checkpoint.origin, tuple(tensors), time.perf_counter() - start)


def _prepare_output(output: Path, needed: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise QuantizeError(f"{output}: is not empty; give a new directory")
    free = shutil.disk_usage(output).free
    if free < needed:
        raise QuantizeError(f"{output}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


class _Hasher:
    """SHA-256 of the source files, beside the work: both read the same pages of them."""

    def __init__(self, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
        self._stop = threading.Event()
        self._futures = {path.name: pool.submit(self._hash, path) for path in checkpoint.source_files()}

    def results(self) -> dict[str, str]:
        return {name: future.result() for name, future in self._futures.items()}

    def _hash(self, path: Path) -> str:
        """Through a map of its own: read() would copy every page first, a fifth of the time of hashing it."""
        digest = hashlib.sha256()
        if path.stat().st_size == 0:
            return digest.hexdigest()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            for begin in range(0, len(pages), _HASHED_BYTES):
                if self._stop.is_set():
                    break
                with memoryview(pages)[begin : begin + _HASHED_BYTES] as block:
                    digest.update(block)
                pages.madvise(mmap.MADV_DONTNEED, begin, min(_HASHED_BYTES, len(pages) - begin))
        return digest.hexdigest()

    def __enter__(self) -> _Hasher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # after an error or Ctrl-C nobody waits for the rest of a large file


def _write_weights(
    checkpoint: Checkpoint,
    planned: list[PlannedTensor],
    output: Path,
    max_shard_bytes: int,
    pool: ThreadPoolExecutor,
    progress: Progress | None,
    calibrator: Calibrator | None,
) -> list[TensorReport]:
    shards = split_shards(planned, max_shard_bytes)
    magnitudes = Magnitudes(checkpoint, pool)
    reports: list[TensorReport] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with SafetensorsWriter(
            output / file_name, [spec for tensor in shard for spec in (*tensor.specs, *tensor.companions)]
        ) as writer:
            for tensor in shard:
                prepared = calibrator.take(tensor.info.name) if calibrator is not None else None
                if prepared is not None:
                    report = write_prepared(tensor, prepared, writer)
                else:
                    report = TensorJob(checkpoint, tensor, writer, pool, magnitudes).run()
                    if calibrator is not None and calibrator.is_uncalibrated(tensor.info.name):
                        report = replace(report, method="rtn")
                companions = calibrator.companions(tensor.info.name) if calibrator is not None else ()
                reports.append(write_companions(tensor, companions, writer, report))
                weight_map |= {spec.name: file_name for spec in (*tensor.specs, *tensor.companions)}
                if progress is not None:
                    progress(len(reports), len(planned), tensor.info.name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(report.bytes_out for report in reports)}, "weight_map": weight_map}
        (output / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return reports


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
            "recipe": recipe.record(),  # calibration is recorded as it was done
            "source": {"origin": checkpoint.origin, "sha256": sources},
            **({} if recipe.kv_cache is None else {"kv_cache": {"scheme": recipe.kv_cache}}),
            "tensors": {tensor.name: _entry(tensor) for tensor in matrices},
        },
    }


def _entry(tensor: TensorReport) -> dict[str, Any]:
    entry: dict[str, Any] = {"scheme": tensor.scheme}
    if tensor.group_size is not None:
        entry["group_size"] = tensor.group_size
    if tensor.granularity not in (None, "channel"):
        entry["granularity"] = tensor.granularity
    entry["symmetric"] = tensor.symmetric
    if tensor.method is not None:
        entry["method"] = tensor.method
    if tensor.activations is not None:
        entry["activations"] = tensor.activations.entry()
    if tensor.has_pre_quant_scale:
        entry["pre_quant_scale"] = True
    entry["bits_per_weight"] = round(tensor.bits_per_weight, 4)
    # Six digits: the order in which processors of different widths add would show in the rest.
    entry["relative_error"] = float(f"{tensor.relative_error:.6g}")
    if tensor.output_error is not None:
        entry["output_error"] = float(f"{tensor.output_error:.4g}")
    return entry
