"""Sensitivity without a text: the error of the values alone, for those who ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantize.checkpoint import Checkpoint
from quantize.finite import check_finite
from quantize.sensitivity.candidate import KeptDtype, round_unit
from quantize.sensitivity.knapsack import Option
from quantize.sensitivity.units import FusedUnit
from quantize.weight_rule import WeightRule


def value_errors(
    checkpoint: Checkpoint, units: Sequence[FusedUnit], candidates: Sequence[WeightRule], kept_dtype: KeptDtype
) -> dict[str, tuple[Option, ...]]:
    """|dW|^2 / |W|^2 of each unit and candidate, times the unit's share of all weights that are chosen for.

    Raises QuantizeError for values that are not finite.
    """
    total = sum(int(np.prod(checkpoint.info(name).shape)) for unit in units for name in unit.names)
    options = {}
    for unit in units:
        weights = {name: np.array(checkpoint.load_float32(name)) for name in unit.names}
        for name, matrix in weights.items():
            check_finite(name, matrix, 0)
        share = sum(matrix.size for matrix in weights.values()) / total
        norm = sum(float(np.square(matrix, dtype=np.float64).sum()) for matrix in weights.values())
        found = []
        for rule in candidates:
            rounded = round_unit(weights, rule, kept_dtype)
            changes = (rounded.weights[name] - matrix for name, matrix in weights.items())
            error = sum(float(np.square(change, dtype=np.float64).sum()) for change in changes)
            found.append(Option(rounded.nbytes, share * error / norm if norm > 0 else 0.0))
        options[unit.label] = tuple(found)
    return options
