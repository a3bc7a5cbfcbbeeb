"""Families whose layout needs more than the names and shapes of a plain decoder."""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.options import LABELS, Consumer
from quantize.export.source import ExportSource
from quantize.split_projections import FUSED_TYPES


def check_family(consumer: Consumer, source: ExportSource) -> None:
    """Raises ExportError for a model that ``consumer`` would not find its tensors of."""
    if source.shape.model_type in FUSED_TYPES:
        raise ExportError(
            f"{source.shape.model_type} models are not exported for {LABELS[consumer]}, which reads qkv_proj and "
            "gate_up_proj as one matrix each; build them for a target of plansmith's own"
        )
