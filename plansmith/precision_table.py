"""An automatic choice of precision for a reader: which layers of each set of linears got which rule."""

from __future__ import annotations

from collections.abc import Iterable

from plansmith.console import human_bytes, table
from quantize import ChoiceRecord

_UNITS = {"kl": "nats per token", "output": "of the hidden states", "weights": "of the values"}


def choice_table(choice: ChoiceRecord) -> str:
    """Sets are named by their first linear: q_proj stands for q, k and v, gate_proj for gate and up."""
    layers: dict[str, list[list[int]]] = {}
    for module, layer, chosen in choice.places():
        layers.setdefault(module, [[] for _ in choice.candidates])[chosen].append(layer)
    rows = [[module, *(_ranges(numbers) for numbers in columns)] for module, columns in layers.items()]
    summary = (
        f"budget {choice.budget.key} {choice.budget.value:g}: {choice.bits_per_weight:.3f} bits per weight of the "
        f"linears, {human_bytes(choice.stored_bytes)} in all; predicted error {choice.predicted_error:.4g} "
        f"{_UNITS[choice.sensitivity]} (sensitivity {choice.sensitivity})"
    )
    return f"{table(['layers of', *choice.candidates], rows)}\n{summary}"


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"; "-" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"
