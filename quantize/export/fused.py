"""Phi-3's projections as its layout has them: q, k and v in one matrix, gate and up in another.

Rows of parts with the same scheme lie below one another, and so do their scales; what belongs to the whole matrix or to
its inputs must be the same for all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import ExportError
from quantize.export.source import ExportSource
from quantize.model_shape import FUSED_PROJECTIONS
from quantize.quantized_tensor import QuantizedTensor
from quantize.split_projections import has_fused_projections
from quantize.weight_rule import FP8_BLOCK

_SHARED = ("tensor_scale", "input_scale", "pre_quant_scale")


@dataclass(frozen=True)
class FusedSource(ExportSource):
    """``shape`` and ``schemes`` have the fused linears; the checkpoint has their parts."""

    def weight(self, name: str) -> QuantizedTensor:
        parts = [super(FusedSource, self).weight(part) for part in parts_of(name)]
        return parts[0] if len(parts) == 1 else stack_rows(name, parts)

    def _float_values(self, name: str) -> npt.NDArray[Any]:
        parts = [super(FusedSource, self)._float_values(part) for part in parts_of(name)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fused(source: ExportSource) -> ExportSource:
    """``source`` with the linears of its family's own layout. Raises ExportError for parts that are no one matrix."""
    if not has_fused_projections(source.checkpoint.config):
        return source
    if source.kv_cache is not None:
        raise ExportError(
            f"scales of the KV cache are not exported for {source.shape.model_type} models, whose keys and values have "
            "no linear of their own; take a recipe without kv_cache"
        )
    shape = replace(source.shape, is_fused=True)
    schemes = {name: source.schemes[parts_of(name)[0]] for name, _ in shape.linear_weights()}
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    result = FusedSource(**(values | {"shape": shape, "schemes": schemes}))
    for name in schemes:
        _check(name, [source.weight(part) for part in parts_of(name)])
    return result


def parts_of(name: str) -> list[str]:
    """Names of the weights in the checkpoint that a weight of the layout is made of; most are made of themselves."""
    for module, parts in FUSED_PROJECTIONS.items():
        if name.endswith(f".{module}.weight"):
            prefix = name.removesuffix(f"{module}.weight")
            return [f"{prefix}{part}.weight" for part in parts]
    return [name]


def stack_rows(name: str, parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One weight of all rows. Raises ExportError for parts that share no scale that they would have to."""
    _check(name, parts)
    first, scales = parts[0], [part.scales for part in parts if part.scales is not None]
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), *first.shape[1:]),
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate(scales) if scales and scales[0].ndim else first.scales,
        zero_points=np.concatenate(zeros) if zeros else None,
    )


def _check(name: str, parts: Sequence[QuantizedTensor]) -> None:
    first = parts[0]
    if any(not _equal(getattr(first, key), getattr(part, key)) for part in parts for key in _SHARED):
        raise ExportError(f"{name!r} is one matrix, but its parts have different scales; quantize the model again")
    if len(parts) == 1 or first.scales is None:
        return
    if first.scales.ndim == 0:
        raise ExportError(f"{name!r} is one matrix, but each of its parts has a scale; take a scale per channel")
    has_blocks = first.scheme == "fp8" and first.scales.shape != (first.shape[0], 1)
    if has_blocks and any(part.shape[0] % FP8_BLOCK for part in parts[:-1]):
        raise ExportError(
            f"{name!r} is one matrix, but the rows of its parts are no multiples of {FP8_BLOCK}, the size of a block; "
            "take a scale per channel"
        )


def _equal(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    return a is None and b is None if a is None or b is None else bool(np.array_equal(a, b))
