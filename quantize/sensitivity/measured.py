"""Measured sensitivity: the unquantized model runs layer by layer, beside it a copy for each set that is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.runner import LayerRunner
from quantize.sensitivity.candidate import KeptDtype, round_unit
from quantize.sensitivity.divergence import mean_divergence
from quantize.sensitivity.knapsack import Option
from quantize.sensitivity.units import FusedUnit
from quantize.weight_rule import WeightRule

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Layers = Callable[[int, int, str], None]
"""Called after each layer with how many are done, how many there are, and a label."""


@dataclass
class SensitivityMeter:
    """Runs ``windows`` [num_samples, sequence_length] of tokens. One layer's weights are in memory at a time."""

    runner: LayerRunner
    windows: npt.NDArray[np.int64]
    candidates: Sequence[WeightRule]
    kept_dtype: KeptDtype
    on_layer: Layers | None = None
    _nbytes: dict[str, list[int]] = field(default_factory=dict)

    def output_errors(self, units: Sequence[FusedUnit]) -> dict[str, tuple[Option, ...]]:
        """Of each unit and candidate the squared error of the layer's output, relative to it, as a mean over tokens."""
        clean = self._embedded()
        errors: dict[str, Float64] = {}
        for layer in range(self.runner.num_layers):
            weights = self.runner.layer_weights(layer)
            after = self._run(layer, weights, clean)
            for unit in _of_layer(units, layer):
                errors[unit.label] = self._try_candidates(unit, weights, clean, after)[0]
            clean = after
            self._report(layer)
        return self._options(units, errors)

    def divergences(self, units: Sequence[FusedUnit], copies: HiddenStates) -> dict[str, tuple[Option, ...]]:
        """Of each unit and candidate the KL divergence of the model in which nothing else is quantized, nats per token.

        It is measured for the candidate of the largest output error and taken as proportional to the squared error of
        the layer's output for the others, as it is for small changes. ``copies``: [num_units * num_samples, ...].
        """
        clean = self._embedded()
        num_samples, started = len(clean), 0
        errors: dict[str, Float64] = {}
        for layer in range(self.runner.num_layers):
            weights = self.runner.layer_weights(layer)
            for place in range(started * num_samples):
                copies.write(place, self.runner.run_layer(layer, weights, copies.read(place)))
            after = self._run(layer, weights, clean)
            for unit in _of_layer(units, layer):
                errors[unit.label], worst = self._try_candidates(unit, weights, clean, after)
                for sample, outputs in enumerate(worst):
                    copies.write(started * num_samples + sample, outputs)
                started += 1
            clean = after
            self._report(layer)

        def read(unit: int) -> Float32:
            return np.concatenate([copies.read(unit * num_samples + sample) for sample in range(num_samples)])

        measured = mean_divergence(self.runner, np.concatenate(list(clean)), read, len(units))
        for unit, divergence in zip(units, measured, strict=True):
            largest = errors[unit.label].max()
            errors[unit.label] = errors[unit.label] * (divergence / largest if largest > 0 else 0.0)
        return self._options(units, errors)

    def _embedded(self) -> Float32:
        """[num_samples, sequence_length, hidden_size]"""
        return np.stack([self.runner.embed(ids) for ids in self.windows])

    def _run(self, layer: int, weights: Mapping[str, Float32], hidden: Float32) -> Float32:
        return np.stack([self.runner.run_layer(layer, weights, window) for window in hidden])

    def _try_candidates(
        self, unit: FusedUnit, weights: Mapping[str, Float32], before: Float32, after: Float32
    ) -> tuple[Float64, Float32]:
        """Errors [num_candidates], and the layer's outputs with the candidate whose error is largest."""
        own = {name: weights[name] for name in unit.names}
        self._nbytes[unit.label], errors, worst = [], [], after
        for rule in self.candidates:
            rounded = round_unit(own, rule, self.kept_dtype)
            self._nbytes[unit.label].append(rounded.nbytes)
            is_same = all(np.array_equal(rounded.weights[name], own[name]) for name in own)
            outputs = after if is_same else self._run(unit.layer, {**weights, **rounded.weights}, before)
            errors.append(_relative_error(outputs, after))
            if not np.isfinite(errors[-1]):
                raise QuantizeError(
                    f"{unit.label}: the outputs of layer {unit.layer} overflow float32 with a candidate of "
                    f"{rule.scheme}; is the checkpoint damaged?"
                )
            if errors[-1] >= max(errors):
                worst = outputs
        return np.array(errors), worst

    def _options(self, units: Sequence[FusedUnit], errors: Mapping[str, Float64]) -> dict[str, tuple[Option, ...]]:
        return {
            unit.label: tuple(
                Option(nbytes, float(error))
                for nbytes, error in zip(self._nbytes[unit.label], errors[unit.label], strict=True)
            )
            for unit in units
        }

    def _report(self, layer: int) -> None:
        if self.on_layer is not None:
            self.on_layer(layer + 1, self.runner.num_layers, f"sensitivity of layer {layer}")


def _of_layer(units: Sequence[FusedUnit], layer: int) -> list[FusedUnit]:
    return [unit for unit in units if unit.layer == layer]


def _relative_error(outputs: Float32, expected: Float32) -> float:
    """Each token counts alike: a few tokens have hidden states a thousand times those of the rest."""
    change = np.square(outputs - expected, dtype=np.float64).sum(axis=-1)
    norm = np.square(expected, dtype=np.float64).sum(axis=-1)
    return float(np.mean(np.divide(change, norm, out=np.zeros_like(change), where=norm > 0)))
