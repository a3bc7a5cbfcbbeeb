"""A linear whose int4 values are chosen: what is stored, what readers see, and what that does to the outputs."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.algorithms.arithmetic import Arithmetic
from quantize.algorithms.grid import Grid, Values, decode
from quantize.algorithms.symmetric import quadratic
from quantize.packing import pack_uint4
from quantize.prepared_tensor import PreparedTensor
from quantize.tiles import output_tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]

_MOST_OUTPUTS = 256  # that the error of the outputs is measured on


@dataclass(frozen=True)
class RoundedLinear:
    """Worked on by some outputs at a time: whole matrices of differences would be the largest of all."""

    targets: Float32  # [in, out], what was rounded: the weights, or the weights corrected for their inputs
    values: Values  # [in, out]
    grid: Grid

    def finish(
        self, weights: Float32, moments: Float32, settings: Int4Settings, pool: Executor, arithmetic: Arithmetic[Any]
    ) -> PreparedTensor:
        """``weights`` [out, in], those before, become what readers see.

        ``moments``: E[x x'] [in, in]; with E[x^2], [in], no error of the outputs is known.
        """
        num_inputs, num_outputs = self.targets.shape
        packed = np.empty((num_outputs, num_inputs // 2), np.uint8)
        sums = pool.map(lambda part: self._decode(part, weights, packed), output_tiles(num_inputs, num_outputs))
        norm, error = np.sum(list(sums), axis=0).tolist()
        relative = None if moments.ndim == 1 else self._output_error(moments, pool, arithmetic)
        arrays = [packed, self.grid.scales.T.astype(self.grid.dtype)]
        if not settings.symmetric:
            arrays.append(np.ascontiguousarray(self.grid.zeros.T).astype(np.uint8))
        return PreparedTensor(tuple(arrays), norm, error, relative)

    def _decode(self, outputs: slice, weights: Float32, packed: Values) -> tuple[float, float]:
        """Squared norm and error of the weights."""
        packed[outputs] = pack_uint4(np.ascontiguousarray(self.values[:, outputs].T))
        decoded = decode(self.values[:, outputs], self.grid.columns(outputs.start, outputs.stop))
        norm = _squared(weights[outputs])
        weights[outputs] -= decoded.T
        error = _squared(weights[outputs])
        weights[outputs] = decoded.T
        return norm, error

    def _output_error(self, gram: Float32, pool: Executor, arithmetic: Arithmetic[Any]) -> float:
        """|X dW'| / |X W'|, over some hundred outputs that stand for all."""
        some = slice(None, None, -(-self.values.shape[1] // _MOST_OUTPUTS))
        wanted = np.ascontiguousarray(self.targets[:, some])
        grid = Grid(self.grid.scales[:, some], self.grid.zeros[:, some], self.grid.dtype)
        change = decode(np.ascontiguousarray(self.values[:, some]), grid)
        change -= wanted
        norm, error = (quadratic(gram, each, pool, arithmetic) for each in (wanted, change))
        return sqrt(max(error, 0.0) / norm) if norm > 0 else 0.0


def _squared(values: Float32) -> float:
    """Row by row in float32, of a few thousand values each; their sum in doubles."""
    return float(np.einsum("oi,oi->o", values, values).sum(dtype=np.float64))
