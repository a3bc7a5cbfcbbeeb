"""Build one rank's plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from builder.file_hashes import file_sha256
from builder.gpu_manifest import Mode, PlanRecord, RankRecord, ShapeRange
from builder.model_spec import ModelSpec
from builder.network.weights import DecoderWeights
from builder.parallel import Rank
from builder.targets.tensorrt.external import write_weights
from builder.targets.tensorrt.legality import check_types
from builder.targets.tensorrt.memory import UnusedPages, return_freed_memory
from builder.targets.tensorrt.module import target_of
from builder.targets.tensorrt.network import BuiltNetwork, build_network
from builder.targets.tensorrt.options import MODES, NetworkOptions
from builder.targets.tensorrt.payload import Payload
from builder.targets.tensorrt.plan import BuiltPlan, write_plan
from builder.targets.tensorrt.scratch_file import ScratchFile
from builder.thread_priority import run_beside_others


def build_rank(
    trt: Any,
    spec: ModelSpec,
    weights: DecoderWeights,
    rank: Rank,
    options: NetworkOptions,
    output: Path,
    on_weight: Callable[[str], None] = lambda name: None,
    on_file: Callable[[str, str], None] = lambda name, sha256: None,
) -> RankRecord:
    """Write ``rank<N>.plan`` and, for external weights, ``rank<N>.safetensors`` to the directory ``output``.

    ``spec`` and ``weights`` count as the rank has them. The plan has an optimization profile for each mode, "mixed"
    first. ``on_file`` is told the name and SHA-256 of each file. Raises BuildError; then neither file is left.
    ``peak_rss_bytes`` is for the caller to fill in.
    """
    start = time.perf_counter()
    return_freed_memory()
    plan_file, weights_file = output / f"rank{rank.rank}.plan", output / f"rank{rank.rank}.safetensors"
    with ScratchFile(output) as scratch:
        network = build_network(trt, spec, weights, rank, options, on_weight=on_weight, scratch=scratch)
    check_types(sorted(network.types), options.sms, target_of(trt))
    payloads = [*network.payloads.values(), *network.external.values()]
    try:
        with (
            UnusedPages(each.source for each in payloads),
            ThreadPoolExecutor(1, initializer=run_beside_others) as beside,
        ):
            # The compiler takes one core, and of external weights it needs no more than the shapes.
            written = beside.submit(_write_weights, weights_file, network.external) if network.external else None
            plan = write_plan(trt, network, options.sms, plan_file)
            on_file(plan_file.name, plan.sha256)
            if written is not None:
                on_file(weights_file.name, written.result())
    except BaseException:
        plan_file.unlink(missing_ok=True)
        weights_file.unlink(missing_ok=True)
        raise
    layers = rank.layers(spec.num_layers)
    return RankRecord(
        rank=rank.rank,
        first_layer=layers.start,
        num_layers=len(layers),
        plans=(_plan_record(plan_file.name, network, plan),),
        weight_files=(weights_file.name,) if network.external else (),
        constants=_bytes_by_dtype(payloads),
        kv_bytes_per_block=kv_bytes_per_block(network),
        other_seconds=max(time.perf_counter() - start - plan.seconds, 0.0),
        peak_rss_bytes=None,
    )


def write_rank_weights(
    trt: Any, spec: ModelSpec, weights: DecoderWeights, rank: Rank, options: NetworkOptions, path: Path
) -> str:
    """Only the external weights of ``rank``: another fine-tune for a plan that was built for the same shape.

    Returns the file's SHA-256.
    """
    return _write_weights(path, build_network(trt, spec, weights, rank, options).external)


def _write_weights(path: Path, external: Mapping[str, Payload]) -> str:
    write_weights(path, external)
    return file_sha256(path)


def kv_bytes_per_block(network: BuiltNetwork) -> int:
    """Keys and values, and their scales, of one block in all layers of the rank."""
    total = 0
    for name, (low, _, _) in network.profiles.items():
        if "_pool." in name:
            total += prod(low) * network.graph.item_bytes(name)  # the smallest pool has one block
    return total


def _plan_record(name: str, network: BuiltNetwork, plan: BuiltPlan) -> PlanRecord:
    return PlanRecord(
        file=name,
        modes=MODES,
        footprint=plan.footprint,
        profiles={mode: _shape_ranges(network, mode) for mode in MODES},
        layers=network.layer_counts(),
        build_seconds=plan.seconds,
    )


def _shape_ranges(network: BuiltNetwork, mode: Mode) -> dict[str, ShapeRange]:
    return {
        name: ShapeRange(min=low, opt=usual, max=high)
        for name, (low, usual, high) in network.graph.profiles[mode].items()
        if "_pool." not in name
    }


def _bytes_by_dtype(payloads: Iterable[Payload]) -> dict[str, int]:
    total: dict[str, int] = {}
    for payload in payloads:
        total[payload.dtype] = total.get(payload.dtype, 0) + payload.nbytes
    return dict(sorted(total.items()))
