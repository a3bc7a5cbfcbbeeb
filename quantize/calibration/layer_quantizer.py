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
from quantize.algorithms.grid import Grid, Values, decode, encode, range_grid
from quantize.algorithms.refine import refine
from quantize.algorithms.scale_search import search_grid
from quantize.algorithms.targets import corrected_targets
from quantize.calibration.folding import Folding
from quantize.calibration.gram import Gram
from quantize.packing import pack_uint4
from quantize.prepared_tensor import PreparedTensor
from quantize.recipe import Int4Settings
from quantize.tiles import run_all, tiles

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
        weights = self._side_by_side(names)
        shared = folding.shared(gram.mean_square)
        factors = folding.fold(search_factors(weights, gram.matrix(), shared, self.rules[names[0]], self.pool))
        for name in names:
            self.weights[name] = self.weights[name] * factors
            self._factors[name] = factors

    def round(self, names: Sequence[str], gram: Gram) -> dict[str, PreparedTensor]:
        """Linears that share one input and one rule."""
        settings, factors = self.rules[names[0]], self._factors.get(names[0])
        # q, k and v side by side: one search.
        weights = self._side_by_side(names)
        moments = gram.mean_square if settings.method == "importance" else gram.matrix()
        missing = None if settings.method == "importance" else gram.missing(weights, factors)
        targets = weights if missing is None else corrected_targets(weights, moments, missing, self.pool, factors)
        values, grid = self._round(targets, moments, settings, factors)
        ends = np.cumsum([len(self.weights[name]) for name in names]).tolist()
        parts = [slice(end - len(self.weights[name]), end) for name, end in zip(names, ends, strict=True)]

        def finish(part: slice) -> tuple[PreparedTensor, Float32]:
            own = grid.columns(part.start, part.stop)
            new = decode(values[:, part], own)
            prepared = _prepare(weights[:, part], targets[:, part], new, values[:, part], own, moments, settings)
            return prepared, np.ascontiguousarray(new.T)

        finished = zip(names, self.pool.map(finish, parts), strict=True)
        return {name: self._replace(name, *done) for name, done in finished}

    def _side_by_side(self, names: Sequence[str]) -> Float32:
        """[in, out] of all, rows contiguous."""
        ends = np.cumsum([len(self.weights[name]) for name in names])
        weights = np.empty((self.weights[names[0]].shape[1], ends[-1]), np.float32)
        for name, end in zip(names, ends, strict=True):
            own = self.weights[name].T
            target = weights[:, end - own.shape[1] : end]
            run_all(self.pool, lambda rows, target=target, own=own: np.copyto(target[rows], own[rows]), tiles(len(own)))  # type: ignore[misc]
        return weights

    def _replace(self, name: str, prepared: PreparedTensor, new: Float32) -> PreparedTensor:
        self.weights[name] = new
        return prepared

    def _round(
        self, weights: Float32, moments: Float32, settings: Int4Settings, factors: Float32 | None
    ) -> tuple[Values, Grid]:
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
    values: Values,
    grid: Grid,
    moments: Float32,
    settings: Int4Settings,
) -> PreparedTensor:
    """``targets`` are what was rounded: the weights, or the weights corrected for their inputs."""
    arrays = [pack_uint4(np.ascontiguousarray(values.T)), grid.scales.T.astype(grid.dtype)]
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
    error, norm = (float(np.vdot(gram @ part, part)) for part in (change, weights))
    return sqrt(max(error, 0.0) / norm) if norm > 0 else 0.0
