"""SmoothQuant (arXiv 2211.10438): outliers of the inputs move into the weights, which round them with less harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from quantize.calibration.folding import Folding
from quantize.calibration.layer_weights import LayerWeights
from quantize.chunk_rounding import round_chunk
from quantize.plan import PlannedTensor
from quantize.prepared_tensor import PreparedTensor
from quantize.rounding import RoundedRows, fp8_scale

Float32 = npt.NDArray[np.float32]

_LARGEST_FACTOR = 1e4  # a column that is nearly always zero must not take all digits of the module before


def smoothing_factors(weights: Sequence[Float32], largest_inputs: Float32, alpha: float) -> Float32:
    """max|x|^alpha / max|W|^(1 - alpha) of every input column, [in]; 1 where either is zero.

    ``weights`` [out, in] of the linears that read the inputs, ``largest_inputs`` [in].
    """
    largest_weights = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    known = (largest_inputs > 0) & (largest_weights > 0)
    inputs, matrix = (np.where(known, values, 1).astype(np.float64) for values in (largest_inputs, largest_weights))
    factors = np.clip(inputs**alpha / matrix ** (1 - alpha), 1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
    return np.where(known, factors, 1).astype(np.float32)


def smooth(
    tensors: Sequence[PlannedTensor], weights: LayerWeights, largest_inputs: Float32, folding: Folding
) -> dict[str, PreparedTensor]:
    """Smooth and round linears that share an input; the factors go where ``folding`` says, in ``weights`` as well."""
    names = [tensor.info.name for tensor in tensors]
    shared = folding.shared_largest(largest_inputs)
    wanted = smoothing_factors([weights[name] for name in names], shared, _alpha(tensors[0]))
    factors = folding.fold(folding.shared_largest(wanted))
    return round_with(tensors, weights, factors, np.ones_like(factors))


def smooth_beside(
    tensors: Sequence[PlannedTensor], weights: LayerWeights, largest_inputs: Float32
) -> tuple[dict[str, PreparedTensor], Float32]:
    """The same with the factors left beside the weights; also returns what the inputs are multiplied with, [in]."""
    factors = smoothing_factors([weights[tensor.info.name] for tensor in tensors], largest_inputs, _alpha(tensors[0]))
    multiplier = (1 / factors).astype(np.float32)
    return round_with(tensors, weights, 1 / multiplier, multiplier), multiplier


def round_with(
    tensors: Sequence[PlannedTensor], weights: LayerWeights, factors: Float32, multiplier: Float32
) -> dict[str, PreparedTensor]:
    """Round ``weights`` times ``factors`` [in]; the inputs are to be multiplied with ``multiplier`` [in].

    What eight bits change in the weights is left out of ``weights``, as it is for tensors that need no calibration:
    the next layer's ranges are then those of the unquantized model, as ModelOpt's are.
    """
    prepared = {}
    scaled = {tensor.info.name: weights[tensor.info.name] * factors for tensor in tensors}
    for tensor in tensors:
        name = tensor.info.name
        # Those that share a scale have one input, so they are smoothed together.
        largest = np.float32(
            max(np.abs(scaled[other]).max() for other in tensor.scaled_with or (name,) if other in scaled)
        )
        prepared[name] = _rounded(tensor, scaled[name], largest)
        weights[name] = scaled[name] * multiplier
    return prepared


def _alpha(planned: PlannedTensor) -> float:
    return (planned.inputs and planned.inputs.smoothing) or 0.0


def _rounded(planned: PlannedTensor, weights: Float32, largest: np.float32) -> PreparedTensor:
    """fp8 and int8 of ``weights``; ``largest``: magnitude of all matrices that share a scale of the matrix."""
    is_whole = planned.floats is not None and planned.floats.granularity == "tensor"
    scale = np.float32(fp8_scale(np.array(largest))) if is_whole else None
    # Only int4's scales may not fit their type.
    rounded, norm = cast("tuple[RoundedRows, float]", round_chunk(weights, 0, planned, np.float32, scale))
    scales = np.array(scale, np.float32) if rounded.scales is None else rounded.scales
    return PreparedTensor((rounded.values, scales), norm, rounded.squared_error)
