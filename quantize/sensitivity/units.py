"""What is chosen together: linears that run-times compute as one product have one precision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plansmith_errors import QuantizeError
from quantize.architectures import fused_set, role_of
from quantize.checkpoint import Checkpoint
from quantize.recipe import Recipe

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class FusedUnit:
    """Linear weights of one layer that get one rule, by name."""

    layer: int
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """The first of them: how the unit is named in tables."""
        return self.names[0].removesuffix(".weight")


def units_to_choose(checkpoint: Checkpoint, recipe: Recipe) -> list[FusedUnit]:
    """By layer, then by name; linears that an override settles are left out. Raises QuantizeError when all are."""
    patterns = [override.match for override in recipe.overrides]
    units: dict[tuple[int, str], list[str]] = {}
    for name in checkpoint.names():
        layer = _LAYER.match(name)
        if layer is None or role_of(name) != "linear" or any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        units.setdefault((int(layer[1]), _together(name)), []).append(name)
    if not units:
        raise QuantizeError(
            f"recipe {recipe.name!r}: auto has nothing to choose, overrides settle every linear; leave auto out"
        )
    return [FusedUnit(key[0], _in_fused_order(names)) for key, names in sorted(units.items())]


def _together(name: str) -> str:
    """Equal for weights that need one precision, as all experts of a layer do: run-times stack them."""
    return name.partition(_EXPERTS)[0] if _EXPERTS in name else fused_set(name)[0]


def _in_fused_order(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (fused_set(name)[0], fused_set(name).index(name))))
