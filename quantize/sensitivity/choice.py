"""The chosen rules, and what config.json says of how they came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Any

from plansmith_errors import QuantizeError
from quantize.recipe import Auto, Recipe
from quantize.sensitivity.knapsack import Choice, Knapsack, Option
from quantize.sensitivity.record import ChoiceRecord, SetRecord
from quantize.sensitivity.sizes import Sizes
from quantize.sensitivity.units import FusedUnit
from quantize.weight_rule import WeightRule


@dataclass(frozen=True)
class AutoChoice:
    rules: dict[str, WeightRule]  # of each weight that was chosen for, by name
    record: ChoiceRecord


def choose_rules(
    recipe: Recipe,
    auto: Auto,
    units: Sequence[FusedUnit],
    options: Mapping[str, tuple[Option, ...]],
    sizes: Sizes,
    text: dict[str, Any] | None,
) -> AutoChoice:
    """The best candidates within the budget. ``text``: the record of what sensitivity was measured on.

    Raises QuantizeError when the budget cannot be reached.
    """
    columns = [options[unit.label] for unit in units]
    knapsack = Knapsack(columns)
    choice = _within_budget(recipe, auto, knapsack, sizes)
    chosen = [column[index] for column, index in zip(columns, choice, strict=True)]
    nbytes = sum(option.nbytes for option in chosen)
    record = ChoiceRecord(
        sensitivity=auto.sensitivity,
        budget=auto.budget,
        bits_per_weight=round(sizes.bits_per_weight(nbytes), 4),
        stored_bytes=sizes.total_bytes(nbytes),
        predicted_error=_digits(_as_budget(auto, fsum(option.error for option in chosen))),
        candidates=tuple(rule_label(rule) for rule in auto.candidates),
        sets={
            unit.label: SetRecord(chosen=index, errors=tuple(_digits(option.error) for option in column))
            for unit, index, column in zip(units, choice, columns, strict=True)
        },
        text=text,
    )
    return repeat_choice(auto, units, record)


def repeat_choice(auto: Auto, units: Sequence[FusedUnit], record: ChoiceRecord) -> AutoChoice:
    """The choice that ``record`` tells of, for the same candidates and units."""
    rules = {name: auto.candidates[record.sets[unit.label].chosen] for unit in units for name in unit.names}
    return AutoChoice(rules, record)


def rule_label(rule: WeightRule) -> str:
    """A rule as a table names it: "int4 g64 gptq"."""
    words: list[str] = [rule.scheme]
    if rule.int4 is not None:
        words.append("channel" if rule.group_size == "channel" else f"g{rule.int4.group_size}")
        words += [] if rule.int4.symmetric else ["zero-points"]
        words += [rule.int4.method] if rule.int4.is_calibrated else []
    words += [word for word in (rule.granularity, rule.scale) if word is not None]
    words += [] if rule.activations is None else [f"{rule.activations}-inputs"]
    return " ".join(words)


def _within_budget(recipe: Recipe, auto: Auto, knapsack: Knapsack, sizes: Sizes) -> Choice:
    budget = auto.budget
    if budget.measure is None:
        sizes.check_reachable(budget, knapsack.smallest, knapsack.largest, recipe)
        choice = knapsack.within_bytes(sizes.allowed_bytes(budget))
    else:
        choice = knapsack.within_error(budget.value if auto.sensitivity == "kl" else budget.value**2)
    if choice is None:
        low, high = (_as_budget(auto, error) for error in (knapsack.least_error, knapsack.smallest_error))
        raise QuantizeError(
            f"recipe {recipe.name!r}: auto.budget.{budget.key} {budget.value:g} cannot be reached; the candidates give "
            f"{low:.4g} to {high:.4g}: raise the budget or add a more precise candidate"
        )
    return choice


def _as_budget(auto: Auto, error: float) -> float:
    """Divergences add up; of other errors the squares do, if they are independent."""
    return error if auto.sensitivity == "kl" else sqrt(error)


def _digits(value: float) -> float:
    """Four: the order in which processors of different widths add would show in the rest."""
    return float(f"{value:.4g}")
