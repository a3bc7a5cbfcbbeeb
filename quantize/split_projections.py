"""Phi-3 stores what other families have as separate linears in one matrix: here they are separate.

``self_attn.qkv_proj`` is q_proj, k_proj and v_proj, ``mlp.gate_up_proj`` is gate_proj and up_proj, in this order of
rows. A part is a view of some of the rows, so that nothing is copied and scales of each part are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.checkpoint_view import CheckpointView
from quantize.model_shape import FUSED_PROJECTIONS, ModelShape

FUSED_TYPES = ("phi3",)


def has_fused_projections(config: Mapping[str, Any]) -> bool:
    """Whether models of this type have their projections in one matrix, where nobody has split them."""
    return config.get("model_type") in FUSED_TYPES


def split_projections(source: Checkpoint) -> Checkpoint:
    """``source`` itself when it has no such matrix. Raises CheckpointError for one of a wrong shape."""
    if not has_fused_projections(source.config) or not any(map(_parts_of, source.names())):
        return source
    return SplitCheckpoint(source)


class SplitCheckpoint(CheckpointView):
    """Raises CheckpointError where a matrix does not have the rows that config.json says."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        config = {**source.config, "tie_word_embeddings": source.is_tied}
        shape = ModelShape.from_config(config, f"{source.path}: config.json")
        sizes = {linear.module: linear.out_features for linear in shape.linears}
        self._places: dict[str, tuple[str, int, int]] = {}  # name -> name in ``source``, first row, number of rows
        for name in source.names():
            parts, begin = _parts_of(name) or {name: ""}, 0
            stored_rows = (source.info(name).shape or (1,))[0]
            for part, module in parts.items():
                rows = sizes[module] if module else stored_rows
                self._add(part, (name, begin, rows))
                begin += rows
            if begin != stored_rows:
                raise CheckpointError(
                    f"{source.path}: tensor {name!r} has {stored_rows} rows, config.json says {begin}; get it again"
                )

    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def info(self, name: str) -> TensorInfo:
        stored, _, rows = self._place(name)
        info = self._source.info(stored)
        if not _parts_of(stored):
            return info
        dtype, shape = self._source.load_dtype(stored), (rows, *info.shape[1:])
        return TensorInfo(name, dtype.name, shape, prod(shape) * dtype.itemsize)

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        stored, first, rows = self._place(name)
        return self._source.load_rows(stored, first + begin, first + min(end, rows))

    def _add(self, name: str, place: tuple[str, int, int]) -> None:
        if name in self._places:
            raise CheckpointError(f"{self.path}: holds {name!r} twice, by itself and within {place[0]!r}")
        self._places[name] = place

    def _place(self, name: str) -> tuple[str, int, int]:
        if name not in self._places:
            raise CheckpointError(f"{self.path}: has no tensor {name!r} (it has {len(self)} others)")
        return self._places[name]

    def _stored_name(self, name: str) -> str:
        return self._place(name)[0]


def _parts_of(name: str) -> dict[str, str]:
    """The parts of a fused matrix, and their modules in a layer; empty for any other tensor."""
    for fused, modules in FUSED_PROJECTIONS.items():
        if name.startswith("model.layers.") and name.endswith(f".{fused}.weight"):
            prefix = name.removesuffix(f"{fused}.weight")
            return {f"{prefix}{module}.weight": module for module in modules}
    return {}
