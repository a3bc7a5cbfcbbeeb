"""One rank's operations in eager torch: what Megatron-LM's split adds to those of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from builder.model_spec import ModelSpec
from builder.network.interpreter.interpreter import Collective
from builder.network.ops import AttentionSpec
from builder.network.weights import DecoderWeights
from builder.parallel import Rank
from builder.targets.reference.ops import TorchOps

if TYPE_CHECKING:
    from torch import Tensor


class RankOps(TorchOps):
    """Implements NetworkOps[torch.Tensor] for ``rank``, with its own ``spec`` and ``weights``.

    ``hidden`` is set before each step but on the first pipeline stage. ``collective`` meets the other ranks.
    """

    hidden: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        rank: Rank,
        collective: Collective,
        *,
        num_slots: int,
        max_seq_len: int,
    ) -> None:
        super().__init__(spec, weights, num_slots=num_slots, max_seq_len=max_seq_len)
        self._rank = rank
        self._collective = collective
        self._layer = 0  # whose attention was computed last

    def embedding(self, weight: str) -> Tensor:
        rows = len(self._weights[weight])
        own = self.batch.input_ids - self._rank.tp_rank * rows
        is_own = (own >= 0) & (own < rows)
        return self._sum(self._weights[weight][own.clamp(0, rows - 1)] * is_own[:, None], weight)

    def row_linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        summed = self._sum(self.linear(x, weight), weight)
        return summed if bias is None else summed + self._weights[bias]

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        # Collectives concatenate along the first axis.
        return self._meet("ALL_GATHER", self.linear(x, weight).T.contiguous(), weight).T

    def paged_attention(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        self._layer = attention.layer
        return super().paged_attention(q, k, v, attention)

    def mix_experts(self, x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        return self._sum(super().mix_experts(x, shares, experts), f"model.layers.{self._layer}.experts")

    def receive_hidden(self) -> Tensor:
        return self.hidden

    def send_hidden(self, x: Tensor) -> Tensor:
        return x

    def _sum(self, x: Tensor, where: str) -> Tensor:
        return self._meet("ALL_REDUCE", x, where)

    def _meet(self, operation: str, x: Tensor, where: str) -> Tensor:
        import torch

        group = self._rank.tp_group
        if len(group) == 1:
            return x
        return torch.from_numpy(self._collective(where, {"op": operation, "group": group}, x.numpy()))
