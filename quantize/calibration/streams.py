"""The calibration windows on their way through the layers: as they are quantized, and as the source has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from quantize.calibration.exact import AllSeen, ExactLayer, ExactWindow
from quantize.calibration.gram import Gram
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.runner import Float32, LayerRunner, Observe
from quantize.calibration.shelf import Shelf, Shelved
from quantize.calibration.stages import Stages

_AT_A_TIME = 4  # windows whose inputs are in memory before they are added to the moments


class Streams:
    """Two runs of the same windows: through the layers as they are quantized, and through the source's own weights.

    ``exact`` None: the first alone. The pool's threads take a window each.
    """

    def __init__(
        self, runner: LayerRunner, hidden: HiddenStates, exact: HiddenStates | None, pool: Executor, shelf: Shelf
    ) -> None:
        self._runner = runner
        self._hidden = hidden
        self._exact = exact
        self._pool = pool
        self._shelf = shelf
        self._begun: list[HiddenStates] = []

    def embed(self, windows: npt.NDArray[np.int64]) -> None:
        """``windows`` [num_windows, num_tokens] of token ids: the inputs of layer 0."""
        for stream in self._all:
            stream.begin(0)
            for window, ids in enumerate(windows):
                stream.write(window, self._runner.embed(ids))
            stream.end()

    def restore(self, layer: int) -> None:
        """Take up the inputs of ``layer`` that a run before kept. Raises OSError."""
        for stream in self._all:
            stream.restore(layer)

    def see(self, layer: int, weights: Mapping[str, Float32], grams: Mapping[str, Gram], observe: Observe) -> None:
        """Run the first stream through a whole layer with ``weights``, but leave it at the layer's inputs.

        Add to ``grams``, by module, the inputs of the layer's linears; ``observe`` sees those of all.
        """

        def run(window: int) -> dict[str, Float32]:
            seen: dict[str, Float32] = {}

            def take(name: str, inputs: Float32) -> None:
                observe(name, inputs)
                if name.removesuffix(".weight") in grams:
                    seen[name.removesuffix(".weight")] = inputs

            self._runner.run_layer(layer, weights, self._hidden.read(window), take)
            return seen

        for begin in range(0, self._num_windows, _AT_A_TIME):
            windows = range(begin, min(begin + _AT_A_TIME, self._num_windows))
            seen = list(self._pool.map(run, windows))
            for module, gram in grams.items():
                gram.add([inputs[module] for inputs in seen if module in inputs])

    def run_exact(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        inputs_of: Collection[str],
        outputs_of: Collection[str],
        *,
        is_last: bool,
    ) -> ExactLayer:
        """Take the second stream through the layer; in the last one, to what is asked for: by modules of linears."""
        stream, exact = self._exact, ExactLayer()
        num_wanted = len(inputs_of) + len(outputs_of)
        if stream is None or (is_last and not num_wanted):
            return exact
        if not is_last:
            self._begin(stream, layer + 1)

        def run(window: int) -> ExactWindow:
            seen = ExactWindow(self._shelf, inputs_of, outputs_of, num_wanted if is_last else -1)
            try:
                result = self._runner.run_layer(layer, weights, stream.read(window), seen.see_inputs, seen.see_outputs)
            except AllSeen:
                return seen
            stream.write(window, result)
            return seen

        windows = list(self._pool.map(run, range(self._num_windows)))
        exact.inputs.update({module: [seen.inputs[module] for seen in windows] for module in inputs_of})
        exact.outputs.update({module: [seen.outputs[module] for seen in windows] for module in outputs_of})
        return exact

    def run_quantized(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        on_inputs: Callable[[str, Sequence[Shelved]], None],
        observe: Observe,
        *,
        is_last: bool,
        to_end: bool,
    ) -> None:
        """Take the first stream through the layer, once.

        ``on_inputs`` is told the weight of a linear and its inputs of all windows, and may then change ``weights`` of
        all linears that read these. In the last layer, whose outputs nobody reads, this ends there unless ``to_end``.
        """
        stages = Stages(self._num_windows, self._pool, self._shelf, on_inputs)
        hidden = self._hidden
        run = self._runner.stage_layer(layer, weights, hidden.shape[1], hidden.read, stages, observe)
        if not is_last:
            self._begin(hidden, layer + 1)
            list(self._pool.map(lambda window: hidden.write(window, run(window)), range(self._num_windows)))
        elif to_end:
            list(self._pool.map(run, range(self._num_windows)))

    def finish(self) -> None:
        """The inputs of the next layer are complete, and those of the layer before go."""
        for stream in self._begun:
            stream.end()
        self._begun = []

    def close(self) -> None:
        """Free what lies on the disk."""
        for stream in self._all:
            stream.__exit__(None, None, None)
        self._shelf.close()

    def _begin(self, stream: HiddenStates, layer: int) -> None:
        stream.begin(layer)
        self._begun.append(stream)

    @property
    def _num_windows(self) -> int:
        return self._hidden.shape[0]

    @property
    def _all(self) -> tuple[HiddenStates, ...]:
        return (self._hidden,) if self._exact is None else (self._hidden, self._exact)
