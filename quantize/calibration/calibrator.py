"""Calibration beside the writer: when it comes to a layer's first tensor, the layer is run and quantized on the way."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from quantize.activations import KvScheme
from quantize.architectures import norms_add_one
from quantize.calibration.calibrated_inputs import CalibratedInputs
from quantize.calibration.exact import ExactLayer
from quantize.calibration.experts import ExpertCoverage
from quantize.calibration.folding import Folding, input_channels
from quantize.calibration.gram import Gram
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.layer_quantizer import LayerQuantizer
from quantize.calibration.layer_weights import LayerWeights
from quantize.calibration.linear_sets import LinearSet, linear_sets
from quantize.calibration.moments import Moments, check_finite, trim_if_large
from quantize.calibration.products import Products
from quantize.calibration.ranges import Ranges
from quantize.calibration.runner import LayerRunner, Observe
from quantize.calibration.sample import CalibrationSample
from quantize.calibration.settings import Precision
from quantize.calibration.shelf import Shelf, Shelved
from quantize.calibration.smoothing import round_with, smooth, smooth_beside
from quantize.calibration.streams import Streams
from quantize.checkpoint import Checkpoint
from quantize.journal import Journal
from quantize.plan import PlannedTensor
from quantize.prepared_tensor import PreparedTensor
from quantize.weight_rule import Method

log = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(?:weight|bias)")


def in_layer_order(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """What belongs to no layer first, then layer by layer."""
    return sorted(planned, key=lambda tensor: _layer_of(tensor.info.name))


def _layer_of(name: str) -> int:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else -1


def first_layer(planned: Sequence[PlannedTensor], num_finished: int) -> int:
    """Where calibration goes on when so many tensors are finished: -1 before the layers, past them when all are."""
    if num_finished < len(planned):
        return _layer_of(planned[num_finished].info.name)
    return _layer_of(planned[-1].info.name) + 1


class Calibrator:
    """Finished tensors, asked for in the order of ``in_layer_order``. One layer's weights are in memory at a time.

    The inputs of a linear are those that all linears before it make as they were quantized. With ``exact``, for the
    same windows through the unquantized model, each makes good what those before it did. Raises QuantizeError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        planned: Sequence[PlannedTensor],
        runner: LayerRunner,
        sample: CalibrationSample,
        hidden: HiddenStates,
        pool: Executor,
        kv_cache: KvScheme | None,
        coverage: ExpertCoverage,
        shelf: Shelf,
        precision: Precision,
        compensating: frozenset[Method],
        journal: Journal | None = None,
        exact: HiddenStates | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._model_type = str(checkpoint.config["model_type"])
        self._rules = {
            tensor.info.name: tensor.int4 for tensor in planned if tensor.int4 is not None and tensor.int4.is_calibrated
        }
        self._moments = Moments(checkpoint, self._rules, Products(pool, precision), compensating)
        self._inputs = CalibratedInputs(planned, kv_cache)
        self._runner = runner
        self._precision = precision
        self._pool = pool
        self._streams = Streams(runner, hidden, exact, pool, shelf)
        self._observing = threading.Lock()  # windows are seen on many threads
        self._coverage = coverage
        self._journal = journal
        self._next_layer = max(first_layer(planned, len(journal.finished) if journal is not None else 0), 0)
        if journal is not None:
            coverage.restore(tensor.report for tensor in journal.finished)
        if self._next_layer == 0:
            self._streams.embed(sample.windows)
        elif self._next_layer < runner.num_layers:
            self._streams.restore(self._next_layer)
        self._finished: dict[str, PreparedTensor] = {}
        self._limits = ExitStack()

    def take(self, name: str) -> PreparedTensor | None:
        """None for a tensor that calibration does not change."""
        while self._next_layer <= _layer_of(name):
            self._finished = self._run_layer(self._next_layer)
            self._next_layer += 1
        return self._finished.pop(name, None)

    def companions(self, name: str) -> tuple[npt.NDArray[Any], ...]:
        """The values of a tensor's ``PlannedTensor.companions``; asked for after ``take``."""
        return self._inputs.companions(name)

    def is_uncalibrated(self, name: str) -> bool:
        """Whether the rule of ``name`` is calibrated, but its expert saw too few tokens: it is rounded to nearest."""
        return name in self._rules and self._coverage.is_uncalibrated(name)

    def __enter__(self) -> Calibrator:
        # The pool's threads compute side by side: those of a matrix library under each of them would only spin.
        self._limits.enter_context(threadpool_limits(1, user_api="blas"))
        self._limits.enter_context(self._runner.calibrating(self._precision))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.close()
        self._streams.close()

    def _run_layer(self, layer: int) -> dict[str, PreparedTensor]:
        if self._journal is not None:
            self._journal.begin_sync()  # the layer before reaches the disk while this one is calibrated
        weights = self._runner.layer_weights(layer)
        for name in weights:
            self._checkpoint.release(name)
        prefix = f"model.layers.{layer}."
        sets = linear_sets(self._model_type, self._coverage.mixture, layer)
        self._coverage.begin(prefix, sets, lambda name: name in self._rules or self._inputs.sees_inputs(name))
        is_last = layer + 1 == self._runner.num_layers
        quantizer = LayerQuantizer(weights, self._rules, self._pool, self._moments.products.arithmetic)
        exact = self._streams.run_exact(layer, weights, *self._moments.compared(prefix, sets), is_last=is_last)
        finished = self._fold_factors(layer, prefix, sets, quantizer, exact)
        by_weight = {f"{prefix}{module}.weight": linears for linears in sets for module in linears.modules}

        def quantize(weight: str, inputs: Sequence[Shelved]) -> None:
            linears = by_weight.pop(weight, None)
            if linears is not None:
                for module in linears.modules:
                    by_weight.pop(f"{prefix}{module}.weight", None)
                finished.update(self._quantize(linears, prefix, quantizer, inputs, exact))

        ranges = self._inputs.static_ranges(prefix)
        self._streams.run_quantized(
            layer, weights, quantize, self._observer(ranges), is_last=is_last, to_end=bool(ranges)
        )
        if self._journal is not None:
            self._journal.settle()  # what the layer before read is about to go
        self._streams.finish()
        self._coverage.lend_ranges(ranges)
        self._inputs.set_scales(ranges)
        return finished

    def _quantize(
        self,
        linears: LinearSet,
        prefix: str,
        quantizer: LayerQuantizer,
        inputs: Sequence[Shelved],
        exact: ExactLayer,
    ) -> dict[str, PreparedTensor]:
        """Linears that share ``inputs``, one array for each window; their exact ones are used up."""
        rules = self._rounded(linears, prefix)
        if not rules:
            return {}
        module = prefix + linears.modules[0]
        gram = self._moments.of(module, rules, inputs, exact.inputs.pop(module, None), exact.outputs.pop(module, None))
        finished: dict[str, PreparedTensor] = {}
        for names in rules:
            finished |= quantizer.round(names, gram)
        return finished

    def _fold_factors(
        self,
        layer: int,
        prefix: str,
        sets: Sequence[LinearSet],
        quantizer: LayerQuantizer,
        exact: ExactLayer,
    ) -> dict[str, PreparedTensor]:
        """Of the whole layer before int4 is rounded: they go into rows of linears that come earlier.

        Experts are counted here, so that those with too few tokens are known before any is rounded.
        """
        ranges = self._inputs.smoothed_ranges(prefix)
        scaled = [linears for linears in sets if any(map(self._is_scaled, self._moments.by_rule(linears, prefix)))]
        grams: dict[str, Gram] = {}
        is_counting = self._coverage.is_counting and any(self._moments.by_rule(linears, prefix) for linears in sets)
        is_unseen = any(prefix + linears.modules[0] not in exact.inputs for linears in scaled)
        if ranges or is_counting or is_unseen:
            grams = self._see_inputs(layer, prefix, scaled, quantizer.weights, ranges)
        finished: dict[str, PreparedTensor] = {}
        for linears in sets:
            module = prefix + linears.modules[0]
            for names in filter(self._is_scaled, self._rounded(linears, prefix)):
                folding = self._folding(linears, prefix, quantizer.weights, names)
                if folding is not None:
                    gram = grams.get(module) or self._moments.of(module, [names], exact.inputs[module])
                    quantizer.scale(names, gram, folding)
                    finished |= folding.changed
            grams.pop(module, None)
            if module in exact.outputs:
                exact.inputs.pop(module, None)  # one of the two is enough from here on
            finished |= self._smooth(linears, prefix, quantizer.weights, ranges)
        return finished

    def _is_scaled(self, names: list[str]) -> bool:
        return self._rules[names[0]].method == "awq"

    def _smooth(
        self, linears: LinearSet, prefix: str, weights: LayerWeights, ranges: Ranges
    ) -> dict[str, PreparedTensor]:
        """Tensors of the set that the recipe smooths."""
        finished: dict[str, PreparedTensor] = {}
        for tensors in self._inputs.smoothed_sets(linears, prefix):
            names = [tensor.info.name for tensor in tensors]
            if self._coverage.is_starved(prefix, linears):
                ones = np.ones(tensors[0].info.shape[1], np.float32)
                finished |= round_with(tensors, weights, ones, ones)
                if not tensors[0].folds_smoothing:
                    self._inputs.set_multiplier(names, ones, None)
                continue
            largest = ranges.columns(names[0])
            if not tensors[0].folds_smoothing:
                prepared, multiplier = smooth_beside(tensors, weights, largest)
                # Experts that saw too few tokens borrow the ranges of the others, which are all seen later.
                self._inputs.set_multiplier(names, multiplier, largest if linears.expert is None else None)
                finished |= prepared
                continue
            folding = self._folding(linears, prefix, weights, names)
            if folding is not None:
                finished |= smooth(tensors, weights, largest, folding) | folding.changed
                continue
            if linears.expert is None:
                log.warning("%s: nothing before it can take up smoothing factors, so it is not smoothed", names[0])
            else:
                self._coverage.warn_unsmoothed()
            finished |= round_with(tensors, weights, np.ones_like(largest), np.ones_like(largest))
        return finished

    def _rounded(self, linears: LinearSet, prefix: str) -> list[list[str]]:
        """As above; of an expert that saw too few tokens none."""
        return [] if self._coverage.is_starved(prefix, linears) else self._moments.by_rule(linears, prefix)

    def _see_inputs(
        self, layer: int, prefix: str, sets: Sequence[LinearSet], weights: LayerWeights, ranges: Ranges
    ) -> dict[str, Gram]:
        """Of ``sets``, by their first modules; of the whole layer the ``ranges``, and how many tokens experts see."""
        grams = {prefix + linears.modules[0]: self._moments.empty(linears, prefix) for linears in sets}
        self._streams.see(layer, weights, grams, self._observer(ranges))
        self._coverage.end()
        for module, gram in grams.items():
            check_finite(module, gram)
        trim_if_large(grams.values())
        return grams

    def _observer(self, ranges: Ranges) -> Observe:
        def observe(name: str, inputs: npt.NDArray[np.float32]) -> None:
            with self._observing:
                ranges.observe(name, inputs)
                self._coverage.observe(name, inputs)

        return observe

    def _folding(self, linears: LinearSet, prefix: str, weights: LayerWeights, names: list[str]) -> Folding | None:
        """Factors may go into a norm if all that read it have one rule, and into a linear that is rounded after it."""
        if linears.producer is None:
            return None
        producer = prefix + linears.producer
        written, read = (self._checkpoint.info(name).shape for name in (f"{producer}.weight", names[0]))
        is_norm = len(written) == 1
        is_changed = f"{producer}.weight" in self._rules or self._inputs.is_smoothed(f"{producer}.weight")
        if len(names) < len(linears.modules) or not (is_norm or is_changed):
            return None
        stored = f"{producer}.weight" if is_norm else f"{producer}.bias"
        dtype = self._checkpoint.load_dtype(stored) if stored in weights else np.dtype(np.float32)
        channels = input_channels(read[1], written[0], self._runner.head_dim)
        return Folding(weights, producer, channels, dtype, norms_add_one(self._model_type))
