"""Operations of one decoder layer over all windows of a calibration, each linear waiting for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from builder.network.ops import AttentionSpec
from builder.targets.reference.moe import mix_outputs, rows_of
from builder.targets.reference.window_ops import WindowOps, outside_a_layer

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.calibration.stages import ByWindow, Stages


class Staged:
    """A tensor of every window: computed for one when it is asked for, or read from where it is kept."""

    def __init__(self, compute: Callable[[int], Tensor], *, is_kept: bool = False) -> None:
        self._compute = compute
        self.is_kept = is_kept

    def __call__(self, window: int) -> Tensor:
        return self._compute(window)

    def keep(self, read: ByWindow) -> None:
        """From now on read it: what it was computed from may go."""
        self._compute, self.is_kept = _tensor_of(read), True

    def as_array(self, window: int) -> npt.NDArray[np.float32]:
        """Computed on whichever thread asks."""
        import torch

        with torch.inference_mode():
            values: npt.NDArray[np.float32] = self(window).numpy()
        return values


class StagedOps:
    """NetworkOps[Staged]: the layer is written down once and computed window by window, in stages.

    A linear first has its inputs computed for all windows; then ``stages`` may change its weights, and only then is
    it computed itself. Between linears nothing is kept but sums, which are read twice.
    """

    def __init__(self, ops: WindowOps, stages: Stages) -> None:
        self._ops = ops
        self._stages = stages

    def linear(self, x: Staged, weight: str, bias: str | None = None) -> Staged:
        if not x.is_kept:
            x.keep(self._stages.gather(weight, x.as_array, self._ops.forget_copies))
        return Staged(lambda window: self._ops.linear(x(window), weight, bias))

    def row_linear(self, x: Staged, weight: str, bias: str | None = None) -> Staged:
        return self.linear(x, weight, bias)

    def lm_head(self, x: Staged, weight: str) -> Staged:
        raise outside_a_layer("lm_head")

    def add(self, a: Staged, b: Staged) -> Staged:
        total = Staged(lambda window: self._ops.add(a(window), b(window)))
        return Staged(_tensor_of(self._stages.remember(total.as_array)))

    def rms_norm(self, x: Staged, weight: str, eps: float) -> Staged:
        return Staged(lambda window: self._ops.rms_norm(x(window), weight, eps))

    def split_heads(self, x: Staged, num_heads: int) -> Staged:
        return Staged(lambda window: self._ops.split_heads(x(window), num_heads))

    def rope(self, x: Staged, layer: int) -> Staged:
        return Staged(lambda window: self._ops.rope(x(window), layer))

    def paged_attention(self, q: Staged, k: Staged, v: Staged, attention: AttentionSpec) -> Staged:
        return Staged(lambda window: self._ops.paged_attention(q(window), k(window), v(window), attention))

    def multiply(self, a: Staged, b: Staged) -> Staged:
        return Staged(lambda window: self._ops.multiply(a(window), b(window)))

    def silu(self, x: Staged) -> Staged:
        return Staged(lambda window: self._ops.silu(x(window)))

    def gelu_tanh(self, x: Staged) -> Staged:
        return Staged(lambda window: self._ops.gelu_tanh(x(window)))

    def scale(self, x: Staged, factor: float) -> Staged:
        return Staged(lambda window: self._ops.scale(x(window), factor))

    def soft_cap(self, x: Staged, cap: float) -> Staged:
        return Staged(lambda window: self._ops.soft_cap(x(window), cap))

    def columns(self, x: Staged, begin: int, end: int) -> Staged:
        return Staged(lambda window: self._ops.columns(x(window), begin, end))

    def route(self, scores: Staged, experts_per_token: int, *, normalizes: bool) -> Staged:
        shares = Staged(lambda window: self._ops.route(scores(window), experts_per_token, normalizes=normalizes))
        return Staged(_tensor_of(self._stages.store(shares.as_array)))

    def mix_experts(self, x: Staged, shares: Staged, experts: Sequence[Callable[[Staged], Staged]]) -> Staged:
        """One expert after the other: of each its outputs are kept, for the tokens that it was given."""
        outputs = [
            Staged(_tensor_of(self._stages.store(expert(_part(x, shares, index)).as_array)))
            for index, expert in enumerate(experts)
        ]
        return Staged(lambda window: mix_outputs(x(window), shares(window), [output(window) for output in outputs]))

    def embedding(self, weight: str) -> Staged:
        raise outside_a_layer("embedding")

    def gather_logits_rows(self, x: Staged) -> Staged:
        raise outside_a_layer("gather_logits_rows")

    def receive_hidden(self) -> Staged:
        raise outside_a_layer("receive_hidden")

    def send_hidden(self, x: Staged) -> Staged:
        raise outside_a_layer("send_hidden")


def _part(x: Staged, shares: Staged, expert: int) -> Staged:
    """The tokens that were given to an expert."""
    return Staged(lambda window: x(window)[rows_of(shares(window), expert)])


def _tensor_of(read: ByWindow) -> Callable[[int], Tensor]:
    import torch

    return lambda window: torch.from_numpy(read(window))
