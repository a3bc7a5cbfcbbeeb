"""Quantize a checkpoint: row by row through all processors, straight into the output files."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from plansmith_errors import PlansmithError, QuantizeError
from quantize.calibration.calibrator import in_layer_order
from quantize.calibration.runner import CalibrationTools
from quantize.calibration.start import Calibration
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.foreign.keeping import keep_stored
from quantize.foreign.recognize import dequantized
from quantize.plan import PlannedTensor, plan_tensors, with_rules
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe
from quantize.report import QuantizeReport, TensorReport
from quantize.resume import Resume
from quantize.rotation.checkpoint import rotated
from quantize.sensitivity.auto import AutoPrecision
from quantize.sensitivity.kept import keeping_choice
from quantize.shape_fit import check_shapes
from quantize.tokenizer_fit import check_tokenizer_fits
from quantize.weight_files import Progress, write_weights

MAX_SHARD_BYTES = 4 * 2**30
_HASHED_BYTES = 8 * 2**20  # of a file that are mapped at a time


def quantize_checkpoint(
    source: Path,
    output: Path,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    calibration_tools: CalibrationTools | None = None,
    resume: Resume | None = None,
) -> QuantizeReport:
    """Write the quantized checkpoint of ``source`` into ``output``, a new or empty directory.

    The caller owns atomicity; config.json is written last, so a directory without it was not finished. The same
    input gives the same bytes. Working memory is bounded, whatever the model's size. A recipe with a calibrated method
    needs ``calibration_tools``. With ``resume`` a run that was stopped or killed is continued by the next with the same
    ``output``: what it finished stays, and the result has the same bytes. Raises CheckpointError for the source and
    QuantizeError for the recipe, the values (NaN, infinity), the calibration text and the output.
    """
    try:
        return _quantize(source, output, recipe, progress, max_shard_bytes, calibration_tools, resume)
    except OSError as error:
        advice = "the quantized checkpoint is incomplete"
        if resume is not None:
            advice = "what is finished is kept, run it again to go on"
        raise QuantizeError(f"{error.filename or output}: {error.strerror or error}; {advice}") from None


def _quantize(
    source: Path,
    output: Path,
    recipe: Recipe,
    progress: Progress | None,
    max_shard_bytes: int,
    calibration_tools: CalibrationTools | None,
    resume: Resume | None,
) -> QuantizeReport:
    start = time.perf_counter()
    checkpoint = rotated(dequantized(open_checkpoint(source)), recipe.rotations)
    planned = keep_stored(checkpoint, plan_tensors(checkpoint, recipe))
    check_shapes(checkpoint)
    check_tokenizer_fits(checkpoint)
    chosen, calibration = None, None
    if recipe.auto is not None:
        auto = AutoPrecision(checkpoint, planned, recipe, recipe.auto, calibration_tools)
        chosen = auto.choose(_existing_directory(output), progress, resume)
        resume = keeping_choice(resume, chosen.record) if resume is not None else None
        planned = keep_stored(checkpoint, with_rules(checkpoint, planned, recipe, chosen.rules))
    if any(tensor.is_calibrated for tensor in planned):
        planned = in_layer_order(planned)
        calibration = Calibration(checkpoint, planned, recipe, calibration_tools, keep=resume is not None)
    side_files = checkpoint.side_files()
    _prepare_output(output, sum(tensor.nbytes for tensor in planned), resume)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool, _Hasher(checkpoint, pool) as hasher:
        try:
            tensors = _write_weights(checkpoint, planned, output, max_shard_bytes, pool, progress, calibration, resume)
        except PlansmithError:
            if resume is not None:
                resume.discard()  # the same weights would end here again
            raise
        sources = hasher.results()
    for name, data in side_files.items():
        (output / name).write_bytes(data)
    config = _config(checkpoint, recipe, tensors, sources)
    if calibration is not None:
        config["quantization_config"]["calibration"] = calibration.record()
        calibration.coverage.warn()
    if chosen is not None:
        config["quantization_config"]["auto"] = chosen.record.data()
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return QuantizeReport(recipe.name, checkpoint.origin, tuple(tensors), time.perf_counter() - start)


def _prepare_output(output: Path, needed: int, resume: Resume | None) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if resume is not None:
        needed -= sum(file.stat().st_size for file in output.iterdir())
    elif any(output.iterdir()):
        raise QuantizeError(f"{output}: is not empty; give a new directory")
    free = shutil.disk_usage(output).free
    if free < needed:
        raise QuantizeError(f"{output}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def _existing_directory(path: Path) -> Path:
    """The nearest one at or above ``path``, on the disk that it will be on."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())


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
    calibration: Calibration | None,
    resume: Resume | None,
) -> list[TensorReport]:
    def can_start(num_finished: int) -> bool:
        return calibration is None or resume is None or calibration.can_start(resume.directory, num_finished)

    with ExitStack() as stack:
        journal = calibrator = None
        if resume is not None:
            journal = stack.enter_context(resume.open(output, planned, max_shard_bytes, pool, can_start))
        if calibration is not None:
            directory = output if resume is None else resume.directory
            calibrator = stack.enter_context(calibration.start(directory, pool, journal))
        return write_weights(checkpoint, planned, output, max_shard_bytes, pool, progress, calibrator, journal)


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
    if tensor.is_kept:
        entry["kept"] = True
    entry["bits_per_weight"] = round(tensor.bits_per_weight, 4)
    # Six digits: the order in which processors of different widths add would show in the rest.
    entry["relative_error"] = float(f"{tensor.relative_error:.6g}")
    if tensor.output_error is not None:
        entry["output_error"] = float(f"{tensor.output_error:.4g}")
    return entry
