"""One tensor on its way into the output: rows in chunks over threads (NumPy releases the GIL), then its scales."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.checkpoint import Checkpoint
from quantize.plan import PlannedTensor
from quantize.report import TensorReport
from quantize.rounding import RoundedRows, round_fp8, round_int4, round_int8
from quantize.safetensors_writer import SafetensorsWriter, TensorSlot, TensorSpec

_CHUNK_VALUES = 2**17  # of one task: its float32 arrays stay in a core's second-level cache


@dataclass(frozen=True)
class _ChunkResult:
    scales: npt.NDArray[Any] | None
    zero_points: npt.NDArray[np.uint8] | None
    squared_norm: float
    squared_error: float


@dataclass(frozen=True)
class TensorJob:
    """Raises QuantizeError for values that cannot be stored."""

    checkpoint: Checkpoint
    planned: PlannedTensor
    writer: SafetensorsWriter
    pool: Executor

    def run(self) -> TensorReport:
        """Write the tensor and what belongs to it."""
        specs = self.planned.specs
        slot = self.writer.add(specs[0])
        stored: list[npt.NDArray[Any]] = []
        results = self._round_all(slot, np.float16) or self._round_all(slot, np.float32) or []
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
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
                kept = source.astype(slot.spec.dtype, copy=False)
            self._check_finite(kept, begin, f"does not fit {slot.spec.dtype.name}; change keep_dtype")
            slot.write_rows(begin, kept)
            return _ChunkResult(None, None, norm, _conversion_error(source, kept))
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


def _conversion_error(source: npt.NDArray[Any], kept: npt.NDArray[Any]) -> float:
    if kept.dtype == source.dtype:
        return 0.0
    return float(np.square(kept.astype(np.float64) - source.astype(np.float64)).sum())


def _round(rows: npt.NDArray[np.float32], planned: PlannedTensor, scale_dtype: npt.DTypeLike) -> RoundedRows | None:
    if planned.int4 is not None:
        int4 = planned.int4
        return round_int4(rows, int4.group_size, symmetric=int4.symmetric, scale=int4.scale, scale_dtype=scale_dtype)
    return round_fp8(rows) if planned.scheme == "fp8" else round_int8(rows)
