"""Scales that belong to a whole module, whichever part of it a rank holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from plansmith_errors import ExportError
from quantize.export.casting import required_scales
from quantize.export.source import ExportSource
from quantize.export.trtllm_layout import Module
from quantize.float8 import E4M3_MAX
from quantize.quantized_tensor import INT4_SYMMETRIC_ZERO, QuantizedTensor

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
_SMALLEST_KV_FP8 = np.float32(1.0)


class ModuleScales:
    """Remembers what takes a pass over a weight: every rank asks for it."""

    def __init__(self, source: ExportSource) -> None:
        self._source = source
        self._largest: dict[str, np.float32] = {}

    def of_fp8_weights(self, module: Module) -> Float32:
        """[1] that all of ``scaled_with`` share: the largest of theirs, as the builder would take."""
        own = [required_scales(name, self._source.weight(name)) for name in module.scaled_with]
        return np.array([np.max(np.stack(own))], np.float32)

    def warn_of_rounding(self, modules: Iterable[Module]) -> None:
        """One line, where FP8 weights have scales of their own and are rounded again to the one that they share."""
        fp8 = [module for module in modules if module.own.algorithm == "FP8"]
        parts = [part for module in fp8 for part in (module.experts if module.num_experts else [module])]
        found = [name for part in parts for name in self._rescaled(part)]
        if found:
            log.warning(
                "%d FP8 matrices are rounded again, to the scale that q, k and v, or gate and up, have in common (%s "
                "and others); share_scale true in the recipe gives them one from the start",
                len(found),
                found[0],
            )

    def _rescaled(self, module: Module) -> list[str]:
        common = {name: required_scales(name, self._source.weight(name)) for name in module.scaled_with}
        largest = max(float(scale) for scale in common.values())
        return [name for name in module.sources if float(common[name]) != largest]

    def of_inputs(self, module: Module) -> Float32:
        """[1], static: of the largest inputs of any member; the MoE kernels have one for all experts."""
        found = [self._source.weight(name).input_scale for name in module.sources]
        return np.array([np.max(np.stack([scale for scale in found if scale is not None]))], np.float32)

    def second_of(self, module: Module) -> Float32:
        """[1] weights_scaling_factor_2: of NVFP4 the scale of the tensor; of W4A8 the one that puts INT4 weights into
        e4m3, which the kernels multiply."""
        if module.own.algorithm == "NVFP4":
            scale = self._source.weight(module.sources[0]).tensor_scale
            return np.asarray(scale, np.float32).reshape(1)
        largest = max(self._largest_of(name) for name in module.sources)
        return np.array([largest / np.float32(E4M3_MAX)], np.float32)

    def of_kv_cache(self, names: Sequence[str]) -> Float32:
        """[1] for keys and values together. FP8: at least 1, below which ModelOpt does not go either."""
        found = np.max([self._source.checkpoint.load_float32(name) for name in names])
        scale = max(found, _SMALLEST_KV_FP8) if self._source.kv_cache == "fp8" else found
        return np.array([scale], np.float32)

    def factors_of_inputs(self, module: Module) -> Float32:
        """[in] that the inputs are multiplied with: 1 where they went into the norm before. Raises ExportError when the
        members of a module, which have the same inputs, have different ones."""
        found = [self._source.weight(name) for name in module.sources]
        factors = [_factors(weight) for weight in found]
        for name, other in zip(module.sources, factors, strict=True):
            if not np.array_equal(other, factors[0]):
                raise ExportError(
                    f"{module.sources[0]!r} and {name!r} have different factors of their inputs, which TensorRT-LLM "
                    "1.2 multiplies once for both; quantize the model again from its original"
                )
        return factors[0]

    def _largest_of(self, name: str) -> np.float32:
        """The largest magnitude of INT4 weights."""
        if name not in self._largest:
            weight = self._source.weight(name)
            scales = required_scales(name, weight).astype(np.float32)
            steps = np.abs(weight.unpacked().astype(np.int8) - np.int8(INT4_SYMMETRIC_ZERO))
            self._largest[name] = np.float32((steps.reshape(*scales.shape, -1).max(axis=-1) * scales).max())
        return self._largest[name]


def _factors(weight: QuantizedTensor) -> Float32:
    return np.ones(weight.shape[1], np.float32) if weight.pre_quant_scale is None else weight.pre_quant_scale
