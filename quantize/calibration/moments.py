"""Which moments of which inputs a layer's calibrated linears are rounded by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plansmith_errors import QuantizeError
from quantize.calibration.experts import ExpertGram
from quantize.calibration.gram import Exact, Gram
from quantize.calibration.linear_sets import LinearSet
from quantize.calibration.products import Products
from quantize.calibration.shelf import Shelved
from quantize.checkpoint import Checkpoint
from quantize.freed_memory import trim_freed_memory
from quantize.weight_rule import Int4Settings, Method

_LARGE = 2**26  # bytes of matrices: smaller ones come more often than giving memory back is worth
_AT_A_TIME = 4  # windows whose inputs are added at once: they may come from a file


@dataclass(frozen=True)
class Moments:
    """Raises QuantizeError where inputs overflow."""

    checkpoint: Checkpoint
    rules: Mapping[str, Int4Settings]  # of the calibrated linears, by the names of their weights
    products: Products
    compensating: frozenset[Method]  # methods that round towards the unquantized model's outputs

    def by_rule(self, linears: LinearSet, prefix: str) -> list[list[str]]:
        """Names of the calibrated linears of a set, those of one rule together."""
        by_rule: dict[Int4Settings, list[str]] = {}
        for module in linears.modules:
            name = f"{prefix}{module}.weight"
            if name in self.rules:
                by_rule.setdefault(self.rules[name], []).append(name)
        return list(by_rule.values())

    def compared(self, prefix: str, sets: Sequence[LinearSet]) -> tuple[list[str], list[str]]:
        """First modules of the sets that are compared with the unquantized model's: those of which its inputs are, and
        those of which its outputs are, which takes less where there are fewer of them.

        Experts are not: that model's router may give them other tokens.
        """
        inputs, outputs = [], []
        for linears in sets:
            methods = {self.rules[names[0]].method for names in self.by_rule(linears, prefix)}
            if linears.expert is None and methods & self.compensating:
                module = prefix + linears.modules[0]
                rows, columns = self.checkpoint.info(f"{module}.weight").shape
                is_narrow = len(linears.modules) == 1 and rows < columns
                if is_narrow:
                    outputs.append(module)
                if "awq" in methods or not is_narrow:  # AWQ's factors are found by them
                    inputs.append(module)
        return inputs, outputs

    def empty(self, linears: LinearSet, prefix: str) -> Gram:
        """To be added to while many others are."""
        module, rules = prefix + linears.modules[0], self.by_rule(linears, prefix)
        return self._gram(module, rules, Gram if linears.expert is None else ExpertGram)

    def of(
        self,
        module: str,
        rules: Sequence[Sequence[str]],
        inputs: Sequence[Shelved],
        exact_inputs: Sequence[Shelved] | None = None,
        exact_outputs: Sequence[Shelved] | None = None,
    ) -> Gram:
        """All windows' ``inputs`` [num_tokens, in] of a set of linears, for what its ``rules`` need of them."""
        gram = self._gram(module, rules, Gram)
        for begin in range(0, len(inputs), _AT_A_TIME):
            seen, *exact = (
                [shelved.read() for shelved in (shelf or ())[begin : begin + _AT_A_TIME]]
                for shelf in (inputs, exact_inputs, exact_outputs)
            )
            gram.add(seen, Exact(*exact) if any(exact) else None)
            del seen, exact
        trim_if_large([gram])
        check_finite(module, gram)
        return gram

    def _gram(self, module: str, rules: Sequence[Sequence[str]], kind: type[Gram]) -> Gram:
        columns = self.checkpoint.info(f"{module}.weight").shape[1]
        return kind(columns, self.products, full=any(self.rules[names[0]].method != "importance" for names in rules))


def trim_if_large(grams: Iterable[Gram]) -> None:
    """Give back what computing the windows has freed, before the most memory of the layer is taken."""
    if sum(gram.nbytes for gram in grams) > _LARGE:
        trim_freed_memory()


def check_finite(module: str, gram: Gram) -> None:
    """Raises QuantizeError."""
    if not np.isfinite(gram.mean_square).all():
        raise QuantizeError(f"the inputs of {module} overflow float32 in calibration; is the checkpoint damaged?")
