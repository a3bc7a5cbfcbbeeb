"""The files of weights, tensor after tensor; with a journal, after those that a run before has finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantize.calibration.calibrator import Calibrator
from quantize.checkpoint import Checkpoint
from quantize.foreign.keeping import write_kept
from quantize.journal import FinishedTensor, Journal
from quantize.magnitudes import Magnitudes
from quantize.plan import PlannedTensor, split_shards
from quantize.prepared_tensor import write_companions, write_prepared
from quantize.report import TensorReport
from quantize.safetensors_checkpoint import INDEX_NAME
from quantize.safetensors_writer import SafetensorsWriter
from quantize.tensor_job import TensorJob

Progress = Callable[[int, int, str], None]
"""Called after each tensor with how many are done, how many there are, and its name."""


def write_weights(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedTensor],
    output: Path,
    max_shard_bytes: int,
    pool: Executor,
    progress: Progress | None,
    calibrator: Calibrator | None,
    journal: Journal | None,
) -> list[TensorReport]:
    """Reports in the order of ``planned``. Raises QuantizeError and OSError."""
    shards = split_shards(planned, max_shard_bytes)
    files = _WeightFiles(checkpoint, output, pool, len(planned), progress, calibrator, journal)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        files.write(file_name, shard)
        weight_map |= {spec.name: file_name for tensor in shard for spec in (*tensor.specs, *tensor.companions)}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(report.bytes_out for report in files.reports)},
            "weight_map": weight_map,
        }
        (output / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files.reports


@dataclass
class _WeightFiles:
    checkpoint: Checkpoint
    output: Path
    pool: Executor
    num_tensors: int
    progress: Progress | None
    calibrator: Calibrator | None
    journal: Journal | None
    reports: list[TensorReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._magnitudes = Magnitudes(self.checkpoint, self.pool)

    def write(self, file_name: str, shard: Sequence[PlannedTensor]) -> None:
        begin = len(self.reports)
        finished = self.journal.finished[begin : begin + len(shard)] if self.journal is not None else ()
        self.reports += [tensor.report for tensor in finished]
        planned = [spec for tensor in shard for spec in (*tensor.specs, *tensor.companions)]
        begun = [spec for tensor in finished for spec in tensor.specs]
        with SafetensorsWriter(self.output / file_name, planned, begun=begun) as writer:
            if self.journal is not None:
                self.journal.restored(len(finished), writer)
            for tensor in shard[len(finished) :]:
                self._write_tensor(tensor, writer)
            if self.journal is not None:
                self.journal.settle()

    def _write_tensor(self, tensor: PlannedTensor, writer: SafetensorsWriter) -> None:
        num_specs = len(writer.specs)
        prepared = self.calibrator.take(tensor.info.name) if self.calibrator is not None else None
        if tensor.kept is not None:
            report = write_kept(tensor, tensor.kept, writer, self.pool)
        elif prepared is not None:
            report = write_prepared(tensor, prepared, writer)
        else:
            report = TensorJob(self.checkpoint, tensor, writer, self.pool, self._magnitudes).run()
            if self.calibrator is not None and self.calibrator.is_uncalibrated(tensor.info.name):
                report = replace(report, method="rtn")
        companions = self.calibrator.companions(tensor.info.name) if self.calibrator is not None else ()
        report = write_companions(tensor, companions, writer, report)
        self.checkpoint.release(tensor.info.name)
        self.reports.append(report)
        if self.journal is not None:
            finished = FinishedTensor(report, writer.path.name, writer.specs[num_specs:], writer.end)
            self.journal.record(finished, writer)
        if self.progress is not None:
            self.progress(len(self.reports), self.num_tensors, tensor.info.name)
