"""Everything that can go wrong before calibration begins, and what it will cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from plansmith_errors import QuantizeError
from quantize.calibration.calibrator import Calibrator, first_layer
from quantize.calibration.estimate import CostEstimate, LayerShape, check_limit, estimate_cost
from quantize.calibration.experts import ExpertCoverage
from quantize.calibration.hidden_states import HiddenStates, is_kept
from quantize.calibration.linear_sets import linear_sets
from quantize.calibration.runner import CalibrationTools
from quantize.calibration.sample import CalibrationSample, load_sample
from quantize.calibration.settings import CalibrationSettings, Precision
from quantize.calibration.shelf import Shelf
from quantize.checkpoint import Checkpoint
from quantize.journal import Journal
from quantize.mixture import Mixture
from quantize.plan import PlannedTensor
from quantize.recipe import Recipe
from quantize.weight_rule import Method

log = logging.getLogger(__name__)
_DEAREST_FIRST: tuple[Method, ...] = ("awq", "gptq", "importance", "rtn")


class Calibration:
    """The tokens are chosen and the cost is known; no work is done yet. Raises QuantizeError."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        planned: Sequence[PlannedTensor],
        recipe: Recipe,
        tools: CalibrationTools | None,
        *,
        keep: bool = False,  # the activations of each layer, to start there again
    ) -> None:
        if tools is None:
            raise QuantizeError(f"recipe {recipe.name!r} needs calibration; pass calibration tools")
        settings = tools.settings or recipe.calibration or CalibrationSettings()
        self._keep = keep
        self._checkpoint = checkpoint
        self._planned = planned
        self._kv_cache = recipe.kv_cache
        self._methods = {tensor.info.name: tensor.int4.method for tensor in planned if tensor.int4 is not None}
        self._runner = tools.make_runner(checkpoint)
        self.coverage = _coverage(checkpoint, settings)
        self._compensating = settings.compensating.intersection(self._methods.values())
        self._can_compensate = not {"awq", "gptq"}.isdisjoint(self._methods.values())
        if settings.compensates_drift is not None and not self._can_compensate:
            log.warning("calibration.compensates_drift has no effect: no linear is rounded by awq or gptq")
        self._precision: Precision = settings.precision
        if settings.precision == "auto":
            is_int4_alone = recipe.kv_cache is None and all(map(_is_int4_alone, planned))
            self._precision = self._runner.fastest_precision if is_int4_alone else "float32"
        self._max_bytes = settings.max_activation_gb * 1e9
        longest = self._runner.max_sequence_length
        if settings.sequence_length > longest:
            raise QuantizeError(
                f"calibration.sequence_length is {settings.sequence_length}, the model has {longest} positions; "
                "lower it"
            )
        self.sample: CalibrationSample = load_sample(checkpoint, settings, tools)
        self.cost = self._estimate(settings)
        log.info(
            "calibration: %.1f TFLOP, about %.0f s, %.2f GB of memory, %.2f GB of disk",
            self.cost.flops / 1e12,
            self.cost.seconds,
            self.cost.ram_bytes / 1e9,
            self.cost.disk_bytes / 1e9,
        )
        if tools.on_estimate is not None:
            tools.on_estimate(self.cost)
        check_limit(self.cost, settings.max_seconds)

    def start(self, directory: Path, pool: Executor, journal: Journal | None = None) -> Calibrator:
        """``directory`` takes the files of activations, if they are many or kept."""
        share = self._max_bytes / 2 / len(self._streams)  # of each run between layers; within one, what these leave
        hidden, *exact = (
            HiddenStates(self._hidden_shape, share, directory, keep=self._keep, name=name, pool=pool)
            for name in self._streams
        )
        held = sum(stream.nbytes for stream in (hidden, *exact) if not stream.on_disk)
        return Calibrator(
            self._checkpoint,
            self._planned,
            self._runner,
            self.sample,
            hidden,
            pool,
            self._kv_cache,
            self.coverage,
            Shelf(self._max_bytes - held, directory),
            self._precision,
            self._compensating,
            journal,
            *exact,
        )

    def record(self) -> dict[str, Any]:
        """What config.json says of it, when all is done."""
        drift = {"compensates_drift": bool(self._compensating)} if self._can_compensate else {}
        return {**self.sample.record(), "precision": self._precision, **drift, **self.coverage.record()}

    def can_start(self, directory: Path, num_finished: int) -> bool:
        """Whether ``directory`` holds what the next layer reads."""
        layer = first_layer(self._planned, num_finished)
        return not 0 < layer < self._runner.num_layers or all(
            is_kept(directory, layer, self._hidden_shape, name) for name in self._streams
        )

    @property
    def _streams(self) -> tuple[str, ...]:
        """Names of the runs of the windows: as quantized, and to compare with it through the source's own weights."""
        return ("hidden", "exact") if self._compensating else ("hidden",)

    @property
    def _hidden_shape(self) -> tuple[int, int, int]:
        num_samples, sequence_length = self.sample.windows.shape
        return num_samples, sequence_length, self._runner.hidden_size

    def _estimate(self, settings: CalibrationSettings) -> CostEstimate:
        return estimate_cost(
            [self._layer_shape(layer) for layer in range(self._runner.num_layers)],
            self._runner.hidden_size,
            settings.num_samples,
            settings.sequence_length,
            self._max_bytes,
            keep=self._keep,
            bfloat16=self._precision == "bfloat16",
        )

    def _layer_shape(self, layer: int) -> LayerShape:
        shapes, shares, methods = [], [], set()
        mixture = self.coverage.mixture
        for linears in linear_sets(str(self._checkpoint.config["model_type"]), mixture, layer):
            names = [f"model.layers.{layer}.{module}.weight" for module in linears.modules]
            sizes = [self._checkpoint.info(name).shape for name in names]
            shapes.append((sum(size[0] for size in sizes), sizes[0][1]))
            shares.append(1.0 if mixture is None or linears.expert is None else mixture.share_of_tokens)
            methods |= {self._methods[name] for name in names if name in self._methods}
        dearest: Method = next((name for name in _DEAREST_FIRST if name in methods), "rtn")
        return LayerShape(tuple(shapes), dearest, tuple(shares), dearest in self._compensating)


def _is_int4_alone(tensor: PlannedTensor) -> bool:
    """Whether calibration looks for nothing but int4 values: scales of inputs are those of float32 inputs."""
    return not tensor.is_smoothed and not tensor.companions


def _coverage(checkpoint: Checkpoint, settings: CalibrationSettings) -> ExpertCoverage:
    mixture = Mixture.from_config(checkpoint.config, f"{checkpoint.path}: config.json")
    if mixture is None and "min_expert_tokens" in settings.model_fields_set:
        log.warning("%s: calibration.min_expert_tokens has no effect: the model has no experts", checkpoint.path)
    return ExpertCoverage(mixture, settings.min_expert_tokens)
