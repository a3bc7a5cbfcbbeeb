"""The networks of all ranks, as a build makes them, in one interpreted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from builder.model_spec import ModelSpec
from builder.network.interpreter.engine import InterpretedEngine, RankNetworks
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.legality import check_parallelism
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.tensorrt.module import TensorRtTarget, load_module
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import NetworkOptions
from plugins.inflight_batching.step import EngineLimits

Progress = Callable[[int, int, str], None]


def interpreted_engine(
    checkpoint_dir: Path,
    target: TensorRtTarget,
    parallelism: Parallelism,
    options: NetworkOptions,
    *,
    num_blocks: int,
    garbage: np.random.Generator | None = None,
    progress: Progress | None = None,
) -> InterpretedEngine:
    """Build the networks of all ranks, and nothing from them: no plan.

    ``garbage`` fills the KV pools. Raises BuildError for what cannot be spread so, or what TensorRT refuses.
    """
    from quantize import open_checkpoint

    trt = load_module(target)
    checkpoint = open_checkpoint(checkpoint_dir)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    source = WeightSource(checkpoint, spec)
    check_parallelism(spec, parallelism, source)
    ranks = []
    for rank in parallelism.ranks():
        if progress is not None:
            progress(rank.rank, parallelism.world_size, f"network of rank {rank.rank}")
        ranks.append(_rank_networks(trt, spec, source, rank, options))
    limits = EngineLimits(
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        tokens_per_block=options.tokens_per_block,
        num_blocks=num_blocks,
        vocab_size=spec.vocab_size,
    )
    return InterpretedEngine(trt, ranks, parallelism, limits, garbage=garbage)


def _rank_networks(
    trt: object, spec: ModelSpec, source: WeightSource, rank: Rank, options: NetworkOptions
) -> RankNetworks:
    weights, rank_spec = ShardedWeights(source, spec, rank), spec_of_rank(spec, rank)
    mixed = build_network(trt, rank_spec, weights, rank, options, "mixed")
    return RankNetworks(mixed=mixed, decode=replace(mixed, mode="decode"))  # one network, with a profile for each
