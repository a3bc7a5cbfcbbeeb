"""What calibration asks of those who can run a model: one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantize.calibration.estimate import CostEstimate
from quantize.calibration.layer_weights import LayerWeights
from quantize.calibration.settings import CalibrationSettings, Precision
from quantize.calibration.stages import ByWindow, Stages
from quantize.checkpoint import Checkpoint
from quantize.sensitivity.record import ChoiceRecord

Float32 = npt.NDArray[np.float32]
Observe = Callable[[str, Float32], None]
"""Called with the name of a linear's weight and its input [num_tokens, in]; with the name of a k_scale or v_scale and
the keys after RoPE or the values, [num_tokens, num_kv_heads, head_dim]. The arrays do not change afterwards."""


class LayerRunner(Protocol):
    """A model in float32. It keeps no layer's weights: they come in with every call."""

    num_layers: int
    hidden_size: int
    head_dim: int
    max_sequence_length: int
    vocab_size: int

    def calibrating(self, precision: Precision) -> AbstractContextManager[None]:
        """Meanwhile each call computes with the thread that calls, for those who call from many.

        ``precision`` is that of the linears' factors; sums, and all between linears, stay float32.
        """
        ...

    @property
    def fastest_precision(self) -> Precision:
        """On this processor: bfloat16 or float32."""
        ...

    def embed(self, token_ids: npt.NDArray[np.int64]) -> Float32:
        """[num_tokens] to [num_tokens, hidden_size]."""
        ...

    def layer_weights(self, layer: int) -> LayerWeights:
        """Norms, linears and biases of a layer in float32, shapes checked; held for products of the ``precision``."""
        ...

    def run_layer(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        hidden: Float32,
        observe: Observe | None = None,
        observe_outputs: Observe | None = None,
    ) -> Float32:
        """One whole window [num_tokens, hidden_size] through a layer, attention causal from its first token.

        ``observe_outputs`` is shown what each linear makes of its inputs, without its bias, [num_tokens, out].
        """
        ...

    def stage_layer(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        num_tokens: int,
        read: ByWindow,
        stages: Stages,
        observe: Observe | None = None,
    ) -> ByWindow:
        """All windows, which ``read`` gives, through a layer as in ``run_layer``, but linear by linear.

        ``stages`` takes the inputs of each linear, and ``weights`` may have changed when it returns. What comes back
        computes a window's outputs. Whatever is computed runs on the threads of ``stages``.
        """
        ...

    def logits(self, hidden: Float32, begin: int, end: int) -> Float32:
        """Last norm and head: [num_tokens, hidden_size] after the last layer to the logits of tokens begin..end."""
        ...


RenderChat = Callable[[Checkpoint, Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class CalibrationTools:
    """What stands above this package and calibration needs."""

    make_runner: Callable[[Checkpoint], LayerRunner]
    render_chat: RenderChat | None = None  # chat turns through the model's template
    settings: CalibrationSettings | None = None  # in place of the recipe's
    on_estimate: Callable[[CostEstimate], None] | None = None  # told the cost before work begins
    on_choice: Callable[[ChoiceRecord], None] | None = None  # told of an automatic choice of precision
