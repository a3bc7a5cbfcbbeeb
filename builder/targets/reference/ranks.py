"""The reference spread over ranks: the proof, without a GPU, that a split of a model computes what the model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network import decoder
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.legality import check_parallelism
from builder.sharding.lockstep import Exchange, run_lockstep
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.reference.batch import Batch, make_batch
from builder.targets.reference.rank_ops import RankOps
from plugins.inflight_batching.step import EngineLimits, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_PER_BLOCK = 32


class RankedReference:
    """Implements StepEngine: a thread for each rank of a stage, the stages one after the other.

    Raises BuildError for a parallelism that the model or its quantized weights do not allow.
    """

    def __init__(self, checkpoint_dir: Path, parallelism: Parallelism, limits: EngineLimits) -> None:
        from quantize import open_checkpoint

        checkpoint = open_checkpoint(checkpoint_dir)
        spec = ModelSpec.from_hf_config(checkpoint.config)
        weights = WeightSource(checkpoint, spec)
        check_parallelism(spec, parallelism, weights)
        self.limits = replace(limits, vocab_size=spec.vocab_size)
        self._ranks = parallelism.ranks()
        self._tp_size = parallelism.tp_size
        self._specs = [spec_of_rank(spec, rank) for rank in self._ranks]
        self._ops = [
            RankOps(
                local,
                ShardedWeights(weights, spec, rank),
                rank,
                num_slots=limits.num_blocks * limits.tokens_per_block,
                max_seq_len=limits.max_seq_len,
            )
            for local, rank in zip(self._specs, self._ranks, strict=True)
        ]

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        batch = make_batch(inputs, self.limits.tokens_per_block)
        results: list[Tensor] = []
        for first in self._ranks[:: self._tp_size]:
            results = self._run_stage(first, batch, results)
        logits: npt.NDArray[np.float32] = results[0].numpy()
        return logits

    def close(self) -> None:
        self._ops = []

    def _run_stage(self, first: Rank, batch: Batch, received: list[Tensor]) -> list[Tensor]:
        """What each rank of the stage of ``first`` hands on, or the logits. A rank receives from its like."""
        import torch

        def run(rank: int, exchange: Exchange) -> Tensor:
            ops = self._ops[rank]
            ops.batch, ops.exchange = batch, exchange
            if received:
                ops.hidden = received[rank % self._tp_size]
            with torch.inference_mode():  # of this thread alone
                return decoder(ops, self._specs[rank], self._ranks[rank])

        return run_lockstep(first.tp_group, run)
