"""A tensor that calibration has finished: what is stored, and what it did to the weights and to the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.activations import pre_quant_scale_name
from quantize.plan import PlannedTensor
from quantize.report import TensorReport
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec


@dataclass(frozen=True)
class PreparedTensor:
    arrays: tuple[npt.NDArray[Any], ...]  # in the order of ``PlannedTensor.specs``
    squared_norm: float
    squared_error: float  # against the weights that were rounded: of AWQ, those with its factors
    output_error: float | None = None  # relative, of the linear's outputs on the calibration tokens


def vector(values: npt.NDArray[Any]) -> PreparedTensor:
    """A norm or bias that took up factors."""
    return PreparedTensor((values,), float(np.square(values, dtype=np.float64).sum()), 0.0)


def write_prepared(planned: PlannedTensor, prepared: PreparedTensor, writer: SafetensorsWriter) -> TensorReport:
    """Append the arrays to the file."""
    for spec, array in zip(planned.specs, prepared.arrays, strict=True):
        writer.add(TensorSpec(spec.name, array.dtype, array.shape)).write_rows(0, array)
    info, int4 = planned.info, planned.int4
    return TensorReport(
        name=info.name,
        scheme=planned.scheme,
        shape=info.shape,
        group_size=int4.group_size if int4 else None,
        symmetric=int4 is None or int4.symmetric,
        bytes_in=info.nbytes,
        bytes_out=sum(array.nbytes for array in prepared.arrays),
        squared_norm=prepared.squared_norm,
        squared_error=prepared.squared_error,
        method=int4.method if int4 else None,
        output_error=prepared.output_error,
        granularity=planned.floats.granularity if planned.floats and planned.scheme == "fp8" else None,
    )


def write_companions(
    planned: PlannedTensor, values: Sequence[npt.NDArray[Any]], writer: SafetensorsWriter, report: TensorReport
) -> TensorReport:
    """Append what calibration found of the inputs, keys or values; return the report with it."""
    for spec, array in zip(planned.companions, values, strict=True):
        writer.add(spec).write_rows(0, array)
    if planned.inputs is None:
        return report
    return replace(
        report,
        activations=planned.inputs.activations,
        has_pre_quant_scale=any(spec.name == pre_quant_scale_name(report.name) for spec in planned.companions),
        bytes_out=report.bytes_out + sum(array.nbytes for array in values),
    )
