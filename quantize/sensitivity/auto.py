"""Choose the precision of each linear: what is to be chosen, what that costs, the measurement, the choice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plansmith_errors import QuantizeError
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.runner import CalibrationTools
from quantize.calibration.sample import CalibrationSample, load_sample
from quantize.calibration.settings import CalibrationSettings
from quantize.checkpoint import Checkpoint
from quantize.dtypes import BFLOAT16
from quantize.plan import PlannedTensor
from quantize.recipe import Auto, Recipe
from quantize.resume import Resume
from quantize.sensitivity.choice import AutoChoice, choose_rules, repeat_choice
from quantize.sensitivity.cost import LayerWork, SensitivityWork, check_sensitivity_limit
from quantize.sensitivity.kept import read_kept_choice
from quantize.sensitivity.knapsack import Option
from quantize.sensitivity.measured import Layers, SensitivityMeter
from quantize.sensitivity.sizes import Sizes, expected_range
from quantize.sensitivity.units import units_to_choose
from quantize.sensitivity.values import value_errors

log = logging.getLogger(__name__)


class AutoPrecision:
    """All that can go wrong before the measurement is found when this is made. Raises QuantizeError."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        planned: Sequence[PlannedTensor],
        recipe: Recipe,
        auto: Auto,
        tools: CalibrationTools | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._auto = auto
        self._tools = tools
        self._units = units_to_choose(checkpoint, recipe)
        self._sizes = Sizes(planned, self._units)
        self._sizes.check_reachable(auto.budget, *expected_range(checkpoint, self._units, auto.candidates), recipe)
        if auto.sensitivity != "weights":
            self._prepare_measurement()

    def choose(self, directory: Path, on_layer: Layers | None, resume: Resume | None) -> AutoChoice:
        """``directory`` takes the file of activations, if there are many. The choice of a run to resume stays."""
        kept = read_kept_choice(resume) if resume is not None else None
        choice = self._measured(directory, on_layer) if kept is None else repeat_choice(self._auto, self._units, kept)
        if self._tools is not None and self._tools.on_choice is not None:
            self._tools.on_choice(choice.record)
        return choice

    def _measured(self, directory: Path, on_layer: Layers | None) -> AutoChoice:
        if self._auto.sensitivity != "weights":
            self._announce()
        options = self._options(directory, on_layer)
        text = self._sample.record() if self._auto.sensitivity != "weights" else None
        return choose_rules(self._recipe, self._auto, self._units, options, self._sizes, text)

    def _prepare_measurement(self) -> None:
        if self._tools is None:
            raise QuantizeError(
                f"recipe {self._recipe.name!r} measures sensitivity on a text; pass calibration tools, or choose "
                "sensitivity weights"
            )
        settings = self._tools.settings or self._recipe.calibration or CalibrationSettings()
        if self._recipe.is_calibrated:  # that its text is too short would else be found after the measurement
            load_sample(self._checkpoint, settings, self._tools)
        self._runner = self._tools.make_runner(self._checkpoint)
        self._max_bytes = settings.max_activation_gb * 1e9
        length, longest = self._auto.sequence_length, self._runner.max_sequence_length
        if length > longest:
            raise QuantizeError(f"auto.sequence_length is {length}, the model has {longest} positions; lower it")
        sampled = settings.model_copy(update={"num_samples": self._auto.num_samples, "sequence_length": length})
        self._sample: CalibrationSample = load_sample(self._checkpoint, sampled, self._tools)
        self._max_seconds = settings.max_seconds

    def _announce(self) -> None:
        cost = self._work().estimate(self._max_bytes)
        log.info("sensitivity: %.1f TFLOP, about %.0f s", cost.flops / 1e12, cost.seconds)
        if self._tools is not None and self._tools.on_estimate is not None:
            self._tools.on_estimate(cost)
        check_sensitivity_limit(cost, self._max_seconds, copies=self._auto.sensitivity == "kl")

    def _work(self) -> SensitivityWork:
        sizes = [0] * self._runner.num_layers
        for info in self._checkpoint:
            layer = info.name.removeprefix("model.layers.").split(".")[0]
            if layer.isdecimal() and len(info.shape) == 2:
                sizes[int(layer)] += int(np.prod(info.shape))
        counts = [sum(unit.layer == layer for unit in self._units) for layer in range(len(sizes))]
        return SensitivityWork(
            layers=[LayerWork(size, count) for size, count in zip(sizes, counts, strict=True)],
            num_candidates=len(self._auto.candidates),
            hidden_size=self._runner.hidden_size,
            vocab_size=self._runner.vocab_size,
            num_samples=self._auto.num_samples,
            sequence_length=self._auto.sequence_length,
            copies=self._auto.sensitivity == "kl",
        )

    def _options(self, directory: Path, on_layer: Layers | None) -> dict[str, tuple[Option, ...]]:
        if self._auto.sensitivity == "weights":
            return value_errors(self._checkpoint, self._units, self._auto.candidates, self._kept_dtype)
        meter = SensitivityMeter(self._runner, self._sample.windows, self._auto.candidates, self._kept_dtype, on_layer)
        if self._auto.sensitivity == "output":
            return meter.output_errors(self._units)
        num_samples, length = self._sample.windows.shape
        shape = (len(self._units) * num_samples, length, self._runner.hidden_size)
        with HiddenStates(shape, self._max_bytes, directory) as copies:
            return meter.divergences(self._units, copies)

    def _kept_dtype(self, name: str) -> np.dtype[Any]:
        if self._recipe.keep_dtype == "source":
            return self._checkpoint.kept_dtype(name)
        return BFLOAT16 if self._recipe.keep_dtype == "bfloat16" else np.dtype(self._recipe.keep_dtype)
