"""Calibration of experts: each sees only the tokens that the router gave it, some next to none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.calibration.gram import Exact, Gram
from quantize.calibration.linear_sets import LinearSet
from quantize.calibration.products import Products
from quantize.calibration.ranges import Ranges
from quantize.mixture import Mixture
from quantize.report import TensorReport

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]

_NAMED = 3  # in the warning; config.json has them all


class ExpertGram(Gram):
    """X'X of one of many experts at once. Few inputs are kept as they are, which takes less than their matrix does."""

    def __init__(self, size: int, products: Products, *, full: bool = True) -> None:
        super().__init__(size, products, full=False)
        self._size = size
        self._is_full = full
        self._rows: list[Float32] = []

    def add(self, inputs: Sequence[Float32], exact: Exact | None = None) -> None:
        """``inputs``: arrays [num_tokens, in]"""
        super().add(inputs)
        if self._is_full and self._sum is None:
            self._rows += inputs
            if self.num_tokens > self._size:
                self._multiply()

    def matrix(self) -> Float32:
        """E[x x'], [in, in]. Raises ValueError when only the diagonal was kept."""
        if self._is_full and self._sum is None:
            self._multiply()
        return super().matrix()

    def _multiply(self) -> None:
        self._sum = np.zeros((self._size, self._size), np.float32)
        rows, self._rows = self._rows, []
        self._products.of(rows).add_gram(self._sum)


class ExpertCoverage:
    """Which experts saw too few tokens for their statistics to mean anything."""

    def __init__(self, mixture: Mixture | None, min_tokens: int) -> None:
        self.mixture = mixture
        self._min_tokens = min_tokens
        self._num_tokens: dict[str, int] = {}  # that each expert saw, by its name in the checkpoint
        self._watched: dict[str, str] = {}  # experts by the weight whose inputs are counted, while they are
        self._has_warned = False

    def begin(self, prefix: str, sets: Sequence[LinearSet], is_calibrated: Callable[[str], bool]) -> None:
        """Count the tokens of a layer's experts from now on, of those with a weight that ``is_calibrated``."""
        self._watched = {}
        for linears in sets:
            names = [f"{prefix}{module}.weight" for module in linears.modules]
            if linears.expert is not None and any(map(is_calibrated, names)):
                expert = _expert_of(names[0])
                self._num_tokens[expert] = 0
                # Gate, up and down of an expert see the same number: one of them is counted.
                self._watched = {name: other for name, other in self._watched.items() if other != expert}
                self._watched[names[0]] = expert

    @property
    def is_counting(self) -> bool:
        """Whether experts are watched."""
        return bool(self._watched)

    def observe(self, name: str, inputs: Float32) -> None:
        """``inputs`` [num_tokens, in] of the weight ``name``"""
        if name in self._watched:
            self._num_tokens[self._watched[name]] += len(inputs)

    def restore(self, reports: Iterable[TensorReport]) -> None:
        """Take over what a run before, which was stopped, found of its layers."""
        self._num_tokens |= {_expert_of(report.name): 0 for report in reports if report.method == "rtn"}

    def end(self) -> None:
        """What the layer runs again with its new weights does not count."""
        self._watched = {}

    def is_starved(self, prefix: str, linears: LinearSet) -> bool:
        """Whether the set is of an expert that saw too few tokens."""
        return linears.expert is not None and self.is_uncalibrated(f"{prefix}{linears.modules[0]}.weight")

    def lend_ranges(self, ranges: Ranges) -> None:
        """Give such experts the largest inputs of all experts of the layer: their own are yet to be seen."""
        if self.mixture is None:
            return
        largest: dict[str, Float32] = {}  # by projection
        experts = [(name, columns) for name, columns in ranges.items() if _expert_of(name) in self._num_tokens]
        for name, columns in experts:
            projection = name.rsplit(".", 2)[1]
            largest[projection] = np.maximum(largest.get(projection, np.float32(0)), columns)
        for name, columns in experts:
            if self.is_uncalibrated(name) or not columns.any():
                ranges.observe(name, largest[name.rsplit(".", 2)[1]][None])

    def warn_unsmoothed(self) -> None:
        """Once, and not for each expert."""
        if not self._has_warned:
            log.warning(
                "gate and up of experts are not smoothed: the norm before them is read by the router and all experts; "
                "fold_smoothing false stores factors beside their weights"
            )
        self._has_warned = True

    @property
    def uncalibrated(self) -> list[str]:
        """Names of the experts that saw too few tokens, by layer and number."""
        names = [name for name, num_tokens in self._num_tokens.items() if num_tokens < self._min_tokens]
        return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def is_uncalibrated(self, name: str) -> bool:
        """Whether the tensor ``name`` belongs to such an expert."""
        return self._num_tokens.get(_expert_of(name), self._min_tokens) < self._min_tokens

    def record(self) -> dict[str, Any]:
        """What config.json says of it; nothing for a dense model."""
        if self.mixture is None:
            return {}
        return {"min_expert_tokens": self._min_tokens, "uncalibrated_experts": self.uncalibrated}

    def warn(self) -> None:
        """One line, where there are such experts."""
        names = self.uncalibrated
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            log.warning(
                "%d of %d experts saw fewer than %d calibration tokens and were rounded without them: %s%s; "
                "more calibration.num_samples reach more experts",
                len(names),
                len(self._num_tokens),
                self._min_tokens,
                ", ".join(names[:_NAMED]),
                more,
            )


def _expert_of(weight: str) -> str:
    """For example model.layers.0.mlp.experts.3 of its up_proj.weight."""
    return weight.rsplit(".", 2)[0]
