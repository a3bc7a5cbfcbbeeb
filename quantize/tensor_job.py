"""One tensor on its way into the output: rows in chunks over threads (NumPy releases the GIL), then its scales."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.block_rounding import nvfp4_tensor_scale
from quantize.checkpoint import Checkpoint
from quantize.chunk_rounding import round_chunk
from quantize.finite import check_finite
from quantize.magnitudes import Magnitudes, measure, rows_per_chunk
from quantize.plan import PlannedTensor
from quantize.report import TensorReport
from quantize.rounding import fp8_scale
from quantize.safetensors_writer import SafetensorsWriter, TensorSlot, TensorSpec
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK, Granularity


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
    magnitudes: Magnitudes

    def run(self) -> TensorReport:
        """Write the tensor and what belongs to it."""
        specs = self.planned.specs
        slot = self.writer.add(specs[0])
        stored: list[npt.NDArray[Any]] = []
        tensor_scale = self._tensor_scale()
        results = (
            self._round_all(slot, np.float16, tensor_scale) or self._round_all(slot, np.float32, tensor_scale) or []
        )
        if results[0].scales is not None:
            stored.append(np.concatenate([result.scales for result in results if result.scales is not None]))
        if results[0].zero_points is not None:
            stored.append(np.concatenate([result.zero_points for result in results if result.zero_points is not None]))
        if tensor_scale is not None:
            stored.append(np.array(tensor_scale))
        for spec, array in zip(specs[1:], stored, strict=True):
            self.writer.add(TensorSpec(spec.name, array.dtype, array.shape)).write_rows(0, array)
        return self._report(results, specs[0].nbytes + sum(array.nbytes for array in stored))

    def _tensor_scale(self) -> np.float32 | None:
        """The scale of the whole tensor, for the schemes that have one."""
        if not self.planned.scaled_with:
            return None
        largest = self.magnitudes.largest(self.planned.scaled_with)
        if self.planned.scheme == "nvfp4":
            return nvfp4_tensor_scale(largest)
        return np.float32(fp8_scale(np.array(largest)))

    def _round_all(
        self, slot: TensorSlot, scale_dtype: npt.DTypeLike, tensor_scale: np.float32 | None
    ) -> list[_ChunkResult] | None:
        """None when int4 scales do not fit ``scale_dtype``; values already written are then written again."""
        num_rows = self.planned.info.shape[0]
        row_values = self.planned.info.shape[1] if len(self.planned.info.shape) > 1 else 1
        is_fp8_block = self.planned.scheme == "fp8" and _granularity(self.planned) == "block"
        step = FP8_BLOCK if is_fp8_block else rows_per_chunk(row_values)

        def round_chunk(begin: int) -> _ChunkResult | None:
            return self._round_chunk(slot, begin, step, scale_dtype, tensor_scale)

        results = list(self.pool.map(round_chunk, range(0, num_rows, step)))
        complete = [result for result in results if result is not None]
        return complete if len(complete) == len(results) else None

    def _round_chunk(
        self, slot: TensorSlot, begin: int, step: int, scale_dtype: npt.DTypeLike, tensor_scale: np.float32 | None
    ) -> _ChunkResult | None:
        info = self.planned.info
        source = self.checkpoint.load_rows(info.name, begin, min(begin + step, info.shape[0]))
        if self.planned.scheme == "none":
            return self._keep_chunk(slot, begin, source)
        rounded = round_chunk(source, begin, self.planned, scale_dtype, tensor_scale)
        if rounded is None:
            return None
        rows, norm = rounded
        slot.write_rows(begin, rows.values)
        return _ChunkResult(rows.scales, rows.zero_points, norm, rows.squared_error)

    def _keep_chunk(self, slot: TensorSlot, begin: int, source: npt.NDArray[Any]) -> _ChunkResult:
        name, dtype = self.planned.info.name, slot.spec.dtype
        _, norm = measure(name, source, begin)
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
            kept = source.astype(dtype, copy=False)
        if kept.dtype != source.dtype:
            check_finite(name, kept, begin, f"does not fit {dtype.name}; change keep_dtype")
        slot.write_rows(begin, kept)
        return _ChunkResult(None, None, norm, _conversion_error(source, kept))

    def _report(self, results: Iterable[_ChunkResult], bytes_out: int) -> TensorReport:
        info, int4 = self.planned.info, self.planned.int4
        return TensorReport(
            name=info.name,
            scheme=self.planned.scheme,
            shape=info.shape,
            group_size=int4.group_size if int4 else BLOCK_SIZES.get(self.planned.scheme),
            symmetric=int4 is None or int4.symmetric,
            bytes_in=info.nbytes,
            bytes_out=bytes_out,
            squared_norm=sum(result.squared_norm for result in results),
            squared_error=sum(result.squared_error for result in results),
            granularity=_granularity(self.planned) if self.planned.scheme == "fp8" else None,
        )


def _conversion_error(source: npt.NDArray[Any], kept: npt.NDArray[Any]) -> float:
    if kept.dtype == source.dtype:
        return 0.0
    return float(np.square(kept.astype(np.float64) - source.astype(np.float64)).sum())


def _granularity(planned: PlannedTensor) -> Granularity | None:
    return planned.floats.granularity if planned.floats else None
