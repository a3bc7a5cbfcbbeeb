"""Quantize the linears of one decoder layer by what their inputs looked like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from quantize.algorithms.awq import search_factors
from quantize.algorithms.gptq import gptq
from quantize.algorithms.grid import Grid, decode, encode, range_grid
from quantize.algorithms.scale_search import search_grid
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

    def run(self, names: Sequence[str], gram: Gram, folding: Folding | None) -> dict[str, PreparedTensor]:
        """Linears that share one input and one rule. ``folding``: where AWQ's factors may go; None: nowhere."""
        settings = self.rules[names[0]]
        # q, k and v side by side: one search, one factor for each input column.
        weights = np.concatenate([self.weights[name].T for name in names], axis=1)
        moments = gram.mean_square if settings.method == "importance" else gram.matrix()
        if settings.method == "awq" and folding is not None:
            shared = folding.shared(gram.mean_square)
            factors = folding.fold(search_factors(weights, moments, shared, settings, self.pool))
            weights *= factors[:, None]
            moments /= factors[:, None] * factors
        values, grid = self._round(weights, moments, settings)
        bounds = np.cumsum([0, *(len(self.weights[name]) for name in names)]).tolist()
        prepared = {}
        for name, begin, end in zip(names, bounds, bounds[1:], strict=False):
            part = grid.columns(begin, end)
            new = decode(values[:, begin:end], part)
            prepared[name] = _prepare(weights[:, begin:end], new, values[:, begin:end], part, moments, settings)
            self.weights[name] = np.ascontiguousarray(new.T)
        return prepared

    def _round(self, weights: Float32, moments: Float32, settings: Int4Settings) -> tuple[Float32, Grid]:
        if settings.method == "gptq":
            return gptq(weights, moments, settings, self.pool)
        size, symmetric = settings.group_size, settings.symmetric
        if settings.scale == "absmax":
            grid = range_grid(weights, size, symmetric=symmetric)
        else:
            grid = search_grid(weights, size, moments, self.pool, symmetric=symmetric)
        return encode(weights, grid), grid


def _prepare(
    weights: Float32, new: Float32, values: Float32, grid: Grid, moments: Float32, settings: Int4Settings
) -> PreparedTensor:
    change = new - weights
    arrays = [pack_uint4(np.ascontiguousarray(values.T).astype(np.uint8)), grid.scales.T.astype(grid.dtype)]
    if not settings.symmetric:
        arrays.append(np.ascontiguousarray(grid.zeros.T).astype(np.uint8))
    return PreparedTensor(
        arrays=tuple(arrays),
        squared_norm=float(np.square(weights, dtype=np.float64).sum()),
        squared_error=float(np.square(change, dtype=np.float64).sum()),
        output_error=_relative_output_error(weights, change, moments) if moments.ndim == 2 else None,
    )


def _relative_output_error(weights: Float32, change: Float32, gram: Float32) -> float:
    """|X dW'| / |X W'|, Frobenius norms, through the Gram matrix."""
    error, norm = (float(np.einsum("io,io->o", gram @ part, part).sum(dtype=np.float64)) for part in (change, weights))
    return sqrt(max(error, 0.0) / norm) if norm > 0 else 0.0
