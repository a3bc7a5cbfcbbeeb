"""The calibration windows on their way through the layers, up to the linears that are to be rounded next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from quantize.calibration.gram import Gram
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.runner import Float32, LayerRunner, Observe


class _AllSeen(Exception):  # noqa: N818 - no error: it ends a layer whose remaining modules nobody asked for
    """Every input that was asked for has been seen."""


class Streams:
    """Two runs of the same windows: through the layers as they are quantized, and through the source's own weights.

    ``exact`` None: the first alone.
    """

    def __init__(self, runner: LayerRunner, hidden: HiddenStates, exact: HiddenStates | None) -> None:
        self._runner = runner
        self._hidden = hidden
        self._exact = exact

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

    def see(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        exact: Mapping[str, Float32] | None,
        grams: Mapping[str, Gram],
        observe: Observe | None = None,
    ) -> None:
        """Add to ``grams``, by module, the inputs that the layer's linears have with ``weights``; ``observe`` sees all.

        ``exact``: the layer's weights before rounding; with them, ``grams`` are told what the inputs should be, too.
        """
        wanted: dict[str, Float32] = {}
        compared = {name: gram for name, gram in grams.items() if gram.is_compared}
        for window in range(self._hidden.shape[0]):
            wanted.clear()
            if exact is not None and self._exact is not None and compared:
                self._run(layer, exact, self._exact.read(window), compared, _keep_in(wanted))
            self._run(layer, weights, self._hidden.read(window), grams, _add_to(grams, wanted), observe)

    def advance(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        exact: Mapping[str, Float32] | None,
        observe: Observe | None = None,
    ) -> None:
        """To the inputs of the next layer; ``exact`` None: of the first stream alone. ``observe`` sees that one's."""
        self._advance(self._hidden, layer, weights, observe)
        if self._exact is not None and exact is not None:
            self._advance(self._exact, layer, exact, None)

    def _advance(
        self, stream: HiddenStates, layer: int, weights: Mapping[str, Float32], observe: Observe | None
    ) -> None:
        stream.begin(layer + 1)
        for window in range(stream.shape[0]):
            stream.write(window, self._runner.run_layer(layer, weights, stream.read(window), observe))
        stream.end()

    @property
    def _all(self) -> tuple[HiddenStates, ...]:
        return (self._hidden,) if self._exact is None else (self._hidden, self._exact)

    def close(self) -> None:
        """Free what lies on the disk."""
        for stream in self._all:
            stream.__exit__(None, None, None)

    def _run(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        hidden: Float32,
        grams: Mapping[str, Gram],
        take: Callable[[str, Float32], None],
        see_all: Observe | None = None,
    ) -> None:
        remaining = set(grams)

        def observe(name: str, inputs: Float32) -> None:
            if see_all is not None:
                see_all(name, inputs)
            module = name.removesuffix(".weight")
            if module in remaining:
                take(module, inputs)
                remaining.discard(module)
                if not remaining and see_all is None:
                    raise _AllSeen

        try:
            self._runner.run_layer(layer, weights, hidden, observe)
        except _AllSeen:
            return


def _keep_in(wanted: dict[str, Float32]) -> Callable[[str, Float32], None]:
    def keep(module: str, inputs: Float32) -> None:
        wanted[module] = np.array(inputs)

    return keep


def _add_to(grams: Mapping[str, Gram], wanted: Mapping[str, Float32]) -> Callable[[str, Float32], None]:
    def add(module: str, inputs: Float32) -> None:
        grams[module].add(inputs, wanted.get(module))

    return add
