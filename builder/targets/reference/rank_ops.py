"""One rank's operations in eager torch: what Megatron-LM's split adds to those of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from builder.model_spec import ModelSpec
from builder.network.weights import DecoderWeights
from builder.parallel import Rank
from builder.sharding.lockstep import Exchange, all_reduce
from builder.targets.reference.ops import TorchOps

if TYPE_CHECKING:
    from torch import Tensor


class RankOps(TorchOps):
    """Implements NetworkOps[torch.Tensor] for ``rank``, with its own ``spec`` and ``weights``.

    ``exchange`` and, but on the first pipeline stage, ``hidden`` are set before each step.
    """

    exchange: Exchange
    hidden: Tensor

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, rank: Rank, *, num_slots: int, max_seq_len: int
    ) -> None:
        super().__init__(spec, weights, num_slots=num_slots, max_seq_len=max_seq_len)
        self._tp_rank = rank.tp_rank

    def embedding(self, weight: str) -> Tensor:
        rows = len(self._weights[weight])
        own = self.batch.input_ids - self._tp_rank * rows
        is_own = (own >= 0) & (own < rows)
        return self._sum(self._weights[weight][own.clamp(0, rows - 1)] * is_own[:, None])

    def row_linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        summed = self._sum(self.linear(x, weight))
        return summed if bias is None else summed + self._weights[bias]

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        import torch

        return torch.cat(self.exchange(self.linear(x, weight)), -1)

    def mix_experts(self, x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        return self._sum(super().mix_experts(x, shares, experts))

    def receive_hidden(self) -> Tensor:
        return self.hidden

    def send_hidden(self, x: Tensor) -> Tensor:
        return x

    def _sum(self, x: Tensor) -> Tensor:
        return all_reduce(self.exchange, x)
