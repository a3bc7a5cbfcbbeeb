"""What a rank holds of each part of a module: values, their scales, and what belongs to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.export.casting import cast, cast_scales, required_scales
from quantize.export.int4_rows import pack_rows
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import Module, RankLayout, RankTensor
from quantize.export.trtllm_scales import ModuleScales
from quantize.export.trtllm_schemes import AWQ
from quantize.float8 import cast_e4m3
from quantize.packing import unpack_uint4

Array = npt.NDArray[Any]


class PartCutter:
    """Cuts the parts of modules for one tensor-parallel rank."""

    def __init__(self, source: ExportSource, layout: RankLayout, scales: ModuleScales, tp_rank: int) -> None:
        self._source = source
        self._layout = layout
        self._scales = scales
        self._tp_rank = tp_rank
        self._builders: dict[str, Callable[[Module], Array]] = {
            "weight": self._weight,
            "weights_scaling_factor": self._weight_scales,
            "per_channel_scale": self._weight_scales,
            "weights_scaling_factor_2": scales.second_of,
            "activation_scaling_factor": scales.of_inputs,
            "prequant_scaling_factor": self._prequant,
            "smoother": self._smoother,
        }

    def build(self, tensor: RankTensor) -> Array:
        module = tensor.module
        if module is None:
            raise RuntimeError(f"{tensor.spec.name} belongs to no module")  # a mistake of ours
        build = self._builders[tensor.part]
        if module.num_experts and tensor.part != "activation_scaling_factor":
            return np.stack([build(expert) for expert in module.experts]).reshape(tensor.spec.shape)
        return build(module).reshape(tensor.spec.shape)

    def _cuts(self, module: Module) -> Iterator[tuple[str, slice, slice]]:
        for name, linear in zip(module.sources, module.members, strict=True):
            yield name, *self._layout.mapping.slices(linear, self._layout.shape, self._tp_rank)

    def _weight(self, module: Module) -> Array:
        joined = np.concatenate([self._values(module, *cut) for cut in self._cuts(module)])
        return pack_rows(joined).view(np.int8) if module.own.algorithm in AWQ else joined

    def _values(self, module: Module, name: str, rows: slice, columns: slice) -> Array:
        """int4: unsigned values, one per byte; else as stored, fp8 against the scale of the module."""
        weight = self._source.weight(name)
        if weight.scheme in ("int4", "nvfp4"):
            # A cut along the inputs falls between groups or blocks, so between bytes.
            packed = weight.values[rows, columns.start // 2 : columns.stop // 2]
            return unpack_uint4(packed) if weight.scheme == "int4" else packed
        values = weight.values[rows, columns]
        if weight.scheme == "none":
            return cast(name, values, self._layout.dtype)
        if module.own.algorithm == "FP8":
            return _rescaled(values, required_scales(name, weight), self._scales.of_fp8_weights(module))
        return values

    def _weight_scales(self, module: Module) -> Array:
        if module.own.algorithm == "FP8":
            return self._scales.of_fp8_weights(module)
        parts = []
        for name, rows, columns in self._cuts(module):
            weight = self._source.weight(name)
            scales = required_scales(name, weight)[rows]
            group = weight.group_size
            if group is not None:
                scales = scales[:, columns.start // group : columns.stop // group]
            parts.append(scales if weight.scheme == "nvfp4" else scales.astype(np.float32))
        return np.concatenate(parts)

    def _prequant(self, module: Module) -> Array:
        columns = next(self._cuts(module))[2]
        factors = self._scales.factors_of_inputs(module)[columns]
        return cast_scales(module.sources[0].replace(".weight", ".pre_quant_scale"), factors, self._layout.dtype)

    def _smoother(self, module: Module) -> Array:
        """The plugins divide by it; factors that are stored are refused for them, so there are none."""
        columns = next(self._cuts(module))[2]
        return np.ones(columns.stop - columns.start, np.float32)


def _rescaled(values: Array, own: Array, common: Array) -> Array:
    """fp8 values of scale ``own`` against ``common``, which is not smaller: rounded again where they differ."""
    if np.array_equal(own.reshape(1), common):
        return values
    return cast_e4m3((values.astype(np.float32) * own / common).astype(np.float32, copy=False))
