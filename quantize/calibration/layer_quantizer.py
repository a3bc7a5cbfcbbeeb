"""Quantize the linears of one decoder layer by what their inputs looked like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import numpy.typing as npt

from quantize.algorithms.awq import search_factors
from quantize.algorithms.gptq import gptq
from quantize.algorithms.grid import Grid, decode, encode, range_grid
from quantize.algorithms.refine import refine
from quantize.algorithms.scale_search import search_grid
from quantize.algorithms.targets import corrected_targets
from quantize.calibration.folding import Folding
from quantize.calibration.gram import Gram
from quantize.packing import pack_uint4
from quantize.prepared_tensor import PreparedTensor
from quantize.recipe import Int4Settings

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerQuantizer:
    """``weights`` of the layer, by name, are replaced by what a reader of the checkpoint will see."""

    weights: dict[str, Float32]
    rules: Mapping[str, Int4Settings]  # of the calibrated linears, by name
    pool: Executor
    _factors: dict[str, Float32] = field(default_factory=dict)  # AWQ's, by the name of the weight

    def scale(self, names: Sequence[str], gram: Gram, folding: Folding) -> None:
        """Multiply columns of linears that share one input by AWQ's factors, and divide what writes that input."""
        weights = np.concatenate([self.weights[name].T for name in names], axis=1)
        shared = folding.shared(gram.mean_square)
        factors = folding.fold(search_factors(weights, gram.matrix(), shared, self.rules[names[0]], self.pool))
        for name in names:
            self.weights[name] = self.weights[name] * factors
            self._factors[name] = factors

    def round(self, names: Sequence[str], gram: Gram) -> dict[str, PreparedTensor]:
        """Linears that share one input and one rule."""
        settings, factors = self.rules[names[0]], self._factors.get(names[0])
        # q, k and v side by side: one search.
        weights = np.concatenate([self.weights[name].T for name in names], axis=1)
        moments = gram.mean_square if settings.method == "importance" else gram.matrix()
        drift = None if settings.method == "importance" else gram.drift()
        targets = weights if drift is None else corrected_targets(weights, moments, drift, factors)
        values, grid = self._round(targets, moments, settings, factors)
        bounds = np.cumsum([0, *(len(self.weights[name]) for name in names)]).tolist()
        prepared = {}
        for name, begin, end in zip(names, bounds, bounds[1:], strict=False):
            part = grid.columns(begin, end)
            new = decode(values[:, begin:end], part)
            wanted, got = targets[:, begin:end], values[:, begin:end]
            prepared[name] = _prepare(weights[:, begin:end], wanted, new, got, part, moments, settings)
            self.weights[name] = np.ascontiguousarray(new.T)
        return prepared

    def _round(
        self, weights: Float32, moments: Float32, settings: Int4Settings, factors: Float32 | None
    ) -> tuple[Float32, Grid]:
        if settings.method == "gptq":
            return gptq(weights, moments, settings, self.pool)
        size, symmetric = settings.group_size, settings.symmetric
        if settings.scale == "absmax":
            grid = range_grid(weights, size, symmetric=symmetric)
        else:
            grid = search_grid(weights, size, moments, self.pool, symmetric=symmetric)
        if settings.method == "awq":
            return refine(weights, (encode(weights, grid), grid), moments, settings, self.pool, factors)
        return encode(weights, grid), grid


def _prepare(
    weights: Float32,
    targets: Float32,
    new: Float32,
    values: Float32,
    grid: Grid,
    moments: Float32,
    settings: Int4Settings,
) -> PreparedTensor:
    """``targets`` are what was rounded: the weights, or the weights corrected for their inputs."""
    arrays = [pack_uint4(np.ascontiguousarray(values.T).astype(np.uint8)), grid.scales.T.astype(grid.dtype)]
    if not settings.symmetric:
        arrays.append(np.ascontiguousarray(grid.zeros.T).astype(np.uint8))
    return PreparedTensor(
        arrays=tuple(arrays),
        squared_norm=float(np.square(weights, dtype=np.float64).sum()),
        squared_error=float(np.square(new - weights, dtype=np.float64).sum()),
        output_error=_relative_output_error(targets, new - targets, moments) if moments.ndim == 2 else None,
    )


def _relative_output_error(weights: Float32, change: Float32, gram: Float32) -> float:
    """|X dW'| / |X W'|, Frobenius norms, through the Gram matrix."""
    error, norm = (float(np.einsum("io,io->o", gram @ part, part).sum(dtype=np.float64)) for part in (change, weights))
    return sqrt(max(error, 0.0) / norm) if norm > 0 else 0.0
