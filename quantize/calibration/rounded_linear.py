"""A linear whose int4 values are chosen: what is stored, what readers see, and what that does to the outputs."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from quantize.algorithms.grid import Grid, Values, decode
from quantize.algorithms.symmetric import quadratic
from quantize.packing import pack_uint4
from quantize.prepared_tensor import PreparedTensor
from quantize.tiles import output_tiles
from quantize.weight_rule import Int4Settings

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RoundedLinear:
    """Worked on by some outputs at a time: whole matrices of differences would be the largest of all."""

    targets: Float32  # [in, out], what was rounded: the weights, or the weights corrected for their inputs
    values: Values  # [in, out]
    grid: Grid

    def finish(self, weights: Float32, moments: Float32, settings: Int4Settings, pool: Executor) -> PreparedTensor:
        """``weights`` [out, in], those before, become what readers see.

        ``moments``: E[x x'] [in, in]; with E[x^2], [in], no error of the outputs is known.
        """
        gram = moments if moments.ndim == 2 else None
        sums = pool.map(lambda part: self._decode(part, weights, gram), output_tiles(*weights.T.shape))
        norm, error, output_norm, output_error = np.sum(list(sums), axis=0).tolist()
        arrays = [pack_uint4(np.ascontiguousarray(self.values.T)), self.grid.scales.T.astype(self.grid.dtype)]
        if not settings.symmetric:
            arrays.append(np.ascontiguousarray(self.grid.zeros.T).astype(np.uint8))
        relative = sqrt(max(output_error, 0.0) / output_norm) if output_norm > 0 else 0.0
        return PreparedTensor(tuple(arrays), norm, error, None if gram is None else relative)

    def _decode(self, outputs: slice, weights: Float32, gram: Float32 | None) -> tuple[float, float, float, float]:
        """Squared norm and error of the weights; of the outputs the same, through their Gram matrix."""
        decoded = decode(self.values[:, outputs], self.grid.columns(outputs.start, outputs.stop))
        norm = _squared(weights[outputs])
        weights[outputs] -= decoded.T
        error = _squared(weights[outputs])
        weights[outputs] = decoded.T
        if gram is None:
            return norm, error, 0.0, 0.0
        wanted = self.targets[:, outputs]
        decoded -= wanted
        return norm, error, quadratic(gram, wanted), quadratic(gram, decoded)


def _squared(values: Float32) -> float:
    """Row by row in float32, of a few thousand values each; their sum in doubles."""
    return float(np.einsum("oi,oi->o", values, values).sum(dtype=np.float64))
