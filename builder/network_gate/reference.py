"""The float32 reference as the gate needs it: with the caches and the roundings that the ranks' networks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network import decoder
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.cuts import share_of, split_axis
from builder.targets.reference.batch import make_batch
from builder.targets.reference.input_rounding import InputRounding
from builder.targets.reference.ops import TorchOps
from plugins.inflight_batching.step import EngineLimits, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_PER_BLOCK = 32

ModuleObserver = Callable[[str, npt.NDArray[np.float32]], None]
"""Called with the name of a row-parallel weight and its products [num_tokens, hidden_size], before the bias."""


class GateReference:
    """Implements StepEngine in eager float32; see ReferenceEngine.

    ``rounds_kv``: keys and values are rounded as the checkpoint's calibration says, or stay as they are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        parallelism: Parallelism,
        *,
        max_seq_len: int,
        num_blocks: int,
        rounds_kv: bool,
    ) -> None:
        self._spec = spec
        source = weights if rounds_kv else cast(WeightSource, _FloatCache(weights))
        slots = num_blocks * TOKENS_PER_BLOCK
        self._ops = _GateOps(spec, source, num_slots=slots, max_seq_len=max_seq_len)
        self._ops.parts = _parts(spec, weights.shapes, Rank(parallelism))
        self._limits = EngineLimits(
            max_batch_size=slots,
            max_num_tokens=slots,
            max_seq_len=max_seq_len,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=num_blocks,
            vocab_size=spec.vocab_size,
        )

    def observe(self, observer: ModuleObserver | None) -> None:
        """Show ``observer`` what the coming steps compute; None ends it."""
        self._ops.observer = observer

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        import torch

        self._ops.batch = make_batch(inputs, TOKENS_PER_BLOCK)
        with torch.inference_mode():
            logits: npt.NDArray[np.float32] = decoder(self._ops, self._spec).numpy()
        return logits

    def close(self) -> None:
        """See StepEngine."""


class _GateOps(TorchOps):
    """Inputs are rounded as TensorRT does: scales of tokens are those of a rank's own part of a linear's inputs."""

    parts: Mapping[str, int]  # ranks that share a linear's inputs, by the weight's name; absent: one
    observer: ModuleObserver | None = None

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        from torch.nn import functional

        rounding = self._inputs.get(weight)
        if rounding is not None:
            x = _rounded(x, rounding, self.parts.get(weight, 1))
        return functional.linear(x, self._weights[weight], None if bias is None else self._weights[bias])

    def row_linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        if self.observer is not None:
            self.observer(weight, self.linear(x, weight).numpy())
        return self.linear(x, weight, bias)


def _rounded(x: Tensor, rounding: InputRounding, parts: int) -> Tensor:
    import torch

    if rounding.scale is None and parts > 1:
        x = x if rounding.multiplier is None else x * rounding.multiplier
        alone = InputRounding(rounding.scheme)
        return torch.cat([alone(part) for part in x.chunk(parts, dim=-1)], dim=-1)
    return rounding(x)


def _parts(spec: ModelSpec, names: Iterable[str], rank: Rank) -> dict[str, int]:
    return {name: share_of(name, spec, rank)[1] for name in names if split_axis(name) == "columns"}


class _FloatCache:
    """A checkpoint's weights, without what it says of keys and values."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def kv_scales(self, layer: int) -> None:
        return None
