"""The reference spread over ranks: the proof, without a GPU, that a split of a model computes what the model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network import decoder
from builder.network.interpreter import Meetings, run_lockstep
from builder.network.interpreter.values import Array
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.legality import check_parallelism
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.reference.batch import Batch, make_batch
from builder.targets.reference.rank_ops import RankOps
from plugins.inflight_batching.step import EngineLimits, StepInputs


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
        self._specs = [spec_of_rank(spec, rank) for rank in self._ranks]
        self._meetings = Meetings(parallelism)
        self._ops = [self._ops_of(rank, ShardedWeights(weights, spec, rank)) for rank in self._ranks]

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        batch = make_batch(inputs, self.limits.tokens_per_block)
        logits: npt.NDArray[np.float32] = run_lockstep(self._meetings, partial(self._run, batch))[-1]["logits"]
        return logits

    def close(self) -> None:
        self._ops = []

    def _ops_of(self, rank: Rank, weights: ShardedWeights) -> RankOps:
        return RankOps(
            self._specs[rank.rank],
            weights,
            rank,
            self._meetings.collective(rank.rank),
            num_slots=self.limits.num_blocks * self.limits.tokens_per_block,
            max_seq_len=self.limits.max_seq_len,
        )

    def _run(self, batch: Batch, rank: int, received: Mapping[str, Array]) -> dict[str, Array]:
        import torch

        ops = self._ops[rank]
        ops.batch = batch
        if received:
            ops.hidden = torch.from_numpy(received["hidden_in"])
        with torch.inference_mode():  # of this thread alone
            result = decoder(ops, self._specs[rank], self._ranks[rank]).numpy()
        return {"logits" if self._ranks[rank].is_last_stage else "hidden_out": result}
