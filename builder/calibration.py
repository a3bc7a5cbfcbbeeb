"""A checkpoint's decoder layers, one at a time, for calibration: implements quantize's LayerRunner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network.decoder import decoder_layer, finish_logits
from builder.network.weights import WeightSource
from builder.targets.reference.window_weights import Bfloat16Weights, WindowWeights, multiplies_bfloat16
from plansmith_errors import QuantizeError
from quantize import LayerWeights

if TYPE_CHECKING:
    from quantize import Checkpoint
    from quantize.calibration.runner import Observe
    from quantize.calibration.settings import Precision
    from quantize.calibration.stages import ByWindow, Stages

Float32 = npt.NDArray[np.float32]

_EMBEDDINGS = "model.embed_tokens.weight"
_ROWS = 4096  # of the embedding matrix that are in memory at a time


def calibration_runner(checkpoint: Checkpoint) -> DecoderRunner:
    """Raises QuantizeError where torch is missing, and BuildError for a model that cannot be computed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise QuantizeError(
            "calibration runs the model with torch, which is not installed; run: pip install 'plansmith[quantize]', "
            "or choose a recipe that rounds to nearest"
        ) from None
    return DecoderRunner(checkpoint)


class DecoderRunner:
    """The network of ``builder/network`` in float32 torch, full causal attention within each window."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._spec = ModelSpec.from_hf_config(checkpoint.config)
        self._source = WeightSource(checkpoint, self._spec)
        self.num_layers = self._spec.num_layers
        self.hidden_size = self._spec.hidden_size
        self.head_dim = self._spec.head_dim
        self.max_sequence_length = self._spec.max_positions
        self.vocab_size = self._spec.vocab_size
        self._precision: Precision = "float32"
        self._head: tuple[int, int, Float32] | None = None  # the rows of the head that were asked for last

    @contextmanager
    def calibrating(self, precision: Precision) -> Iterator[None]:
        """See LayerRunner."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._precision = precision
        try:
            yield
        finally:
            self._precision = "float32"
            torch.set_num_threads(before)

    @property
    def fastest_precision(self) -> Precision:
        """See LayerRunner."""
        return "bfloat16" if multiplies_bfloat16() else "float32"

    def embed(self, token_ids: npt.NDArray[np.int64]) -> Float32:
        """[num_tokens] to [num_tokens, hidden_size]."""
        embedded = np.empty((len(token_ids), self.hidden_size), np.float32)
        for begin in range(0, self._spec.vocab_size, _ROWS):
            places = np.flatnonzero((token_ids >= begin) & (token_ids < begin + _ROWS))
            if places.size:
                rows = self._checkpoint.load_rows(_EMBEDDINGS, begin, min(begin + _ROWS, self._spec.vocab_size))
                embedded[places] = rows[token_ids[places] - begin]
        if self._spec.embedding_scale != 1.0:
            embedded *= np.float32(self._spec.embedding_scale)
        return embedded

    def layer_weights(self, layer: int) -> LayerWeights:
        """See LayerRunner. Raises BuildError for a wrong shape or a value that is not finite."""
        prefix = f"model.layers.{layer}."
        shapes = {name: shape for name, shape in self._source.shapes.items() if name.startswith(prefix)}
        # One at a time: in bfloat16 no layer is ever whole in float32.
        read = ((name, np.array(self._read(name, len(shape)), np.float32, order="C")) for name, shape in shapes.items())
        return Bfloat16Weights(read) if self._precision == "bfloat16" else LayerWeights(read)

    def run_layer(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        hidden: Float32,
        observe: Observe | None = None,
        observe_outputs: Observe | None = None,
    ) -> Float32:
        """[num_tokens, hidden_size] of one window to the same shape; ``observe`` sees the input of each linear."""
        import torch

        from builder.targets.reference.window_ops import WindowOps

        with torch.inference_mode():
            ops = WindowOps(self._spec, WindowWeights(weights), len(hidden), observe, observe_outputs)
            result: Float32 = decoder_layer(ops, self._spec, layer, torch.from_numpy(hidden)).numpy()
        return result

    def stage_layer(
        self,
        layer: int,
        weights: Mapping[str, Float32],
        num_tokens: int,
        read: ByWindow,
        stages: Stages,
        observe: Observe | None = None,
    ) -> ByWindow:
        """See LayerRunner."""
        import torch

        from builder.targets.reference.staged_ops import Staged, StagedOps
        from builder.targets.reference.window_ops import WindowOps

        ops = StagedOps(WindowOps(self._spec, WindowWeights(weights), num_tokens, observe), stages)
        hidden = Staged(lambda window: torch.from_numpy(read(window)))
        return decoder_layer(ops, self._spec, layer, hidden).as_array

    def logits(self, hidden: Float32, begin: int, end: int) -> Float32:
        """See LayerRunner. Many hidden states in turn with the same rows of the head read those once."""
        import torch

        from builder.targets.reference.window_ops import WindowOps

        weights = {"norm": self._last_norm, "head": self._head_rows(begin, end)}
        with torch.inference_mode():
            ops = WindowOps(self._spec, WindowWeights(weights), len(hidden), None)
            normed = ops.rms_norm(torch.from_numpy(hidden), "norm", self._spec.rms_norm_eps)
            result: Float32 = finish_logits(ops, self._spec, ops.linear(normed, "head")).numpy()
        return result

    @cached_property
    def _last_norm(self) -> Float32:
        return np.array(self._source.vector("model.norm.weight"), np.float32)

    def _head_rows(self, begin: int, end: int) -> Float32:
        if self._head is None or self._head[:2] != (begin, end):
            rows = self._checkpoint.load_rows(self._spec.lm_head_name, begin, end)
            self._head = begin, end, np.array(rows, np.float32, order="C")
        return self._head[2]

    def _read(self, name: str, num_dims: int) -> Float32:
        return self._source.vector(name) if num_dims == 1 else self._source.matrix(name).dequantize()
