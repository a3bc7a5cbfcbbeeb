"""Budgets in bytes: what the linears to choose for may take, when the rest is settled."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from plansmith_errors import QuantizeError
from quantize.architectures import role_of
from quantize.checkpoint import Checkpoint
from quantize.plan import PlannedTensor
from quantize.recipe import Recipe
from quantize.safetensors_writer import TensorSpec
from quantize.sensitivity.candidate import nearest_rule
from quantize.sensitivity.settings import Budget
from quantize.sensitivity.units import FusedUnit
from quantize.stored_specs import stored_specs
from quantize.weight_rule import WeightRule


def expected_nbytes(specs: Sequence[TensorSpec], rule_scheme: str) -> int:
    """Of a matrix. int4's scales count as float16, which they are unless one leaves its normal range."""
    total = sum(spec.nbytes for spec in specs)
    if rule_scheme != "int4":
        return total
    return total - sum(prod(spec.shape) * 2 for spec in specs if spec.dtype == np.float32)


class Sizes:
    """Bytes of what is not chosen, and the units in which a budget speaks."""

    def __init__(self, planned: Sequence[PlannedTensor], units: Sequence[FusedUnit]) -> None:
        chosen = {name for unit in units for name in unit.names}
        linears = [tensor for tensor in planned if role_of(tensor.info.name) == "linear"]
        settled = [tensor for tensor in planned if tensor.info.name not in chosen]
        self.num_weights = sum(prod(tensor.info.shape) for tensor in linears)
        self._settled = sum(expected_nbytes(tensor.specs, tensor.scheme) for tensor in settled)
        self._settled_linears = sum(
            expected_nbytes(tensor.specs, tensor.scheme) for tensor in linears if tensor.info.name not in chosen
        )

    def allowed_bytes(self, budget: Budget) -> float:
        """Of a size budget: what the chosen linears may take."""
        if budget.size_gb is not None:
            return budget.size_gb * 1e9 - self._settled
        # A share of a byte that the product loses must not cost a choice that fits exactly.
        return round(budget.value * self.num_weights / 8, 3) - self._settled_linears

    def in_units_of(self, budget: Budget, nbytes: int) -> float:
        """``nbytes`` of the chosen linears as the budget counts: gigabytes, or bits per weight."""
        return (nbytes + self._settled) / 1e9 if budget.size_gb is not None else self.bits_per_weight(nbytes)

    def bits_per_weight(self, nbytes: int) -> float:
        return 8 * (nbytes + self._settled_linears) / self.num_weights

    def total_bytes(self, nbytes: int) -> int:
        """Of all stored tensors."""
        return nbytes + self._settled

    def check_reachable(self, budget: Budget, smallest: int, largest: int, recipe: Recipe) -> None:
        """Raises QuantizeError when even the smallest choice passes a size budget."""
        if budget.measure is not None or smallest <= self.allowed_bytes(budget):
            return
        low, high = (self.in_units_of(budget, nbytes) for nbytes in (smallest, largest))
        raise QuantizeError(
            f"recipe {recipe.name!r}: auto.budget.{budget.key} {budget.value:g} cannot be reached; the candidates give "
            f"{low:.4g} to {high:.4g}: raise the budget or add a smaller candidate"
        )


def expected_range(
    checkpoint: Checkpoint, units: Sequence[FusedUnit], candidates: Sequence[WeightRule]
) -> tuple[int, int]:
    """Bytes of the smallest and the largest choice. Raises QuantizeError for a candidate that does not fit a tensor."""
    smallest = largest = 0
    for unit in units:
        sizes = [_unit_nbytes(checkpoint, unit, nearest_rule(rule)) for rule in candidates]
        smallest, largest = smallest + min(sizes), largest + max(sizes)
    return smallest, largest


def _unit_nbytes(checkpoint: Checkpoint, unit: FusedUnit, rule: WeightRule) -> int:
    return sum(
        expected_nbytes(stored_specs(checkpoint.info(name), rule, checkpoint.kept_dtype(name)), rule.scheme)
        for name in unit.names
    )
