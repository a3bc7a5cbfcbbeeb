"""One rank's part of a build, as its worker process is asked for it: plain data in, files and a record out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.options import BuildOptions
from builder.parallel import Rank
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.facts import TARGETS
from builder.targets.tensorrt.options import NetworkOptions

OnWeight = Callable[[int, int, str], None]
"""Told how many weights are done, of how many, and the name of the one at work."""


def build(arguments: Mapping[str, Any], output: Path, on_weight: OnWeight) -> dict[str, Any]:
    """Write the rank's plan, and its weights where they are external, to ``output``.

    Returns its RankRecord, and the SHA-256 of each file. Raises BuildError.
    """
    from builder.targets.tensorrt.build import build_rank

    part = _RankPart(arguments)
    tell = _counting(part.weights, on_weight, "compiling")
    hashes: dict[str, str] = {}
    record = build_rank(part.trt, part.spec, part.weights, part.rank, part.options, output, tell, hashes.__setitem__)
    return {"record": record.model_dump(mode="json"), "sha256": hashes}


def write_weights(arguments: Mapping[str, Any], output: Path, on_weight: OnWeight) -> dict[str, Any]:
    """Write only the rank's external weights, to the file ``weight_file`` in ``output``.

    Returns the SHA-256 of the file. Raises BuildError.
    """
    from builder.targets.tensorrt.build import write_rank_weights

    part = _RankPart(arguments)
    path = output / arguments["weight_file"]
    sha256 = write_rank_weights(part.trt, part.spec, part.weights, part.rank, part.options, path)
    return {"sha256": {path.name: sha256}}


class _RankPart:
    """The rank's own part of the model, and the library that compiles it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from builder.targets.tensorrt.module import load_module
        from quantize import open_checkpoint

        options = BuildOptions.model_validate(arguments["options"])
        checkpoint = open_checkpoint(Path(arguments["checkpoint"]))
        whole = ModelSpec.from_hf_config(checkpoint.config)
        self.rank = Rank(options.parallelism, arguments["rank"])
        self.spec = spec_of_rank(whole, self.rank)
        self.weights = ShardedWeights(WeightSource(checkpoint, whole), whole, self.rank)
        # A target that compiles on the GPU itself takes no list of others.
        sms = tuple(arguments["sms"]) if TARGETS[options.target].is_ahead_of_time else ()
        self.options = network_options_of(options, arguments["max_seq_len"], sms)
        self.trt = load_module(options.target)  # type: ignore[arg-type]


def _counting(weights: ShardedWeights, on_weight: OnWeight, afterwards: str) -> Callable[[str], None]:
    total = sum(len(shape) == 2 for shape in weights.shapes.values())
    done: set[str] = set()

    def tell(name: str) -> None:
        done.add(name)
        on_weight(len(done), total, name if len(done) < total else afterwards)

    return tell


def network_options_of(options: BuildOptions, max_seq_len: int, sms: tuple[int, ...]) -> NetworkOptions:
    """What a build with ``options`` makes networks for; ``max_seq_len`` and ``sms`` as they were resolved."""
    return NetworkOptions(
        dtype=options.resolved_dtype,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=max_seq_len,
        tokens_per_block=options.resolved_tokens_per_block,
        kv_dtype=options.resolved_kv_cache_dtype,
        weights=options.resolved_weights,
        sms=sms,
    )
