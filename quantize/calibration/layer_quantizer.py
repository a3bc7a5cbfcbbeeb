"""Quantize the linears of one decoder layer by what their inputs looked like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic
from quantize.algorithms.awq import search_factors
from quantize.algorithms.gptq import gptq
from quantize.algorithms.grid import Grid, Values, encode, range_grid
from quantize.algorithms.refine import refine
from quantize.algorithms.scale_search import search_grid
from quantize.algorithms.targets import corrected_targets
from quantize.calibration.folding import Folding
from quantize.calibration.gram import Gram
from quantize.calibration.layer_weights import LayerWeights
from quantize.calibration.rounded_linear import RoundedLinear
from quantize.prepared_tensor import PreparedTensor
from quantize.tiles import run_all, tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]

_MOST_OUTPUTS = 256  # that AWQ's strength is chosen by: it is one number for all of them


@dataclass(frozen=True)
class LayerQuantizer:
    """``weights`` of the layer are replaced by what a reader of the checkpoint will see."""

    weights: LayerWeights
    rules: Mapping[str, Int4Settings]  # of the calibrated linears, by name
    pool: Executor
    arithmetic: Arithmetic[Any]  # of what the Gram matrices are multiplied with
    _factors: dict[str, Float32] = field(default_factory=dict)  # AWQ's, by the name of the weight

    def scale(self, names: Sequence[str], gram: Gram, folding: Folding) -> None:
        """Multiply columns of linears that share one input by AWQ's factors, and divide what writes that input."""
        weights = self._side_by_side(names, -(-sum(self.weights.shape(name)[0] for name in names) // _MOST_OUTPUTS))
        shared = folding.shared(gram.mean_square)
        settings = self.rules[names[0]]
        found = search_factors(weights, gram.matrix(), shared, settings, self.pool, self.arithmetic)
        factors = folding.fold(found)
        for name in names:
            self.weights.scale_columns(name, factors)
            self._factors[name] = factors

    def round(self, names: Sequence[str], gram: Gram) -> dict[str, PreparedTensor]:
        """Linears that share one input and one rule."""
        settings, factors = self.rules[names[0]], self._factors.get(names[0])
        # q, k and v side by side: one search.
        targets = weights = self._side_by_side(names)
        moments = gram.mean_square if settings.method == "importance" else gram.matrix()
        missing = None if settings.method == "importance" else gram.missing(weights, factors)
        if missing is not None:
            targets = corrected_targets(weights, moments, missing, self.pool, factors)
        del weights, missing  # of a wide layer each takes hundreds of megabytes
        values, grid = self._round(targets, gram, settings, factors)
        prepared, begin = {}, 0
        for name in names:
            own = self.weights[name]
            end = begin + len(own)
            rounded = RoundedLinear(targets[:, begin:end], values[:, begin:end], grid.columns(begin, end))
            prepared[name] = rounded.finish(own, moments, settings, self.pool, self.arithmetic)
            self.weights.settle(name, own)
            begin = end
        return prepared

    def _side_by_side(self, names: Sequence[str], step: int = 1) -> Float32:
        """[in, out] of all, rows contiguous; of every ``step``th output."""
        columns = self.weights.shape(names[0])[1]
        counts = [len(range(0, self.weights.shape(name)[0], step)) for name in names]
        weights, begin = np.empty((columns, sum(counts)), np.float32), 0
        for name, count in zip(names, counts, strict=True):
            target, own = weights[:, begin : begin + count], self.weights.rows(name, slice(None, None, step))
            run_all(self.pool, partial(_copy, own.T, target), tiles(columns))
            begin += count
        return weights

    def _round(
        self, weights: Float32, gram: Gram, settings: Int4Settings, factors: Float32 | None
    ) -> tuple[Values, Grid]:
        if settings.method == "gptq":
            return gptq(weights, gram.matrix(), settings, self.pool, self.arithmetic)
        size, symmetric = settings.group_size, settings.symmetric
        if settings.scale == "absmax":
            grid = range_grid(weights, size, symmetric=symmetric)
        else:
            grid = search_grid(weights, size, gram.mean_square, self.pool, symmetric=symmetric)
        rounded = encode(weights, grid), grid
        if settings.method == "importance":
            return rounded
        return refine(weights, rounded, gram.matrix(), settings, self.pool, self.arithmetic, factors)


def _copy(source: Float32, target: Float32, rows: slice) -> None:
    target[rows] = source[rows]
