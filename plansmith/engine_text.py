"""An engine of a GPU target for a reader: what it needs, its plans, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable

from builder.gpu_manifest import GpuEngine, PlanRecord, RankRecord
from builder.manifest import EngineManifest
from plansmith.console import human_bytes, table


def engine_lines(manifest: EngineManifest, gpu: GpuEngine) -> list[str]:
    """The compatibility tuple, then a table each of plans, constants, layers and profiles."""
    return [_tuple(manifest, gpu), "", _plans(manifest, gpu), "", _constants(gpu), "", _layers(gpu), "", _profiles(gpu)]


def _tuple(manifest: EngineManifest, gpu: GpuEngine) -> str:
    library = ", ".join(f"{name} {version}" for name, version in manifest.library.items())
    world = gpu.parallelism.world_size
    kv_cache = manifest.kv_cache
    rows = [
        ["library", library],
        ["GPUs", f"{world} of {' or '.join(f'sm{sm}' for sm in gpu.sms)}"],
        ["ranks", f"tp_size {gpu.tp_size} x pp_size {gpu.pp_size}, ep_size {gpu.ep_size}"],
        ["memory", f"{human_bytes(max(rank.gpu_bytes for rank in gpu.ranks))} on a GPU, before its KV cache"],
        ["dtype", gpu.dtype],
        ["weights", gpu.weights],
        [
            "KV cache",
            f"{kv_cache.dtype}, {kv_cache.tokens_per_block} tokens and {human_bytes(kv_cache.bytes_per_block)} in a "
            "block, on a GPU",
        ],
    ]
    return table(["needs", ""], rows, numbers=False)


def _plans(manifest: EngineManifest, gpu: GpuEngine) -> str:
    headers = ["plan", "layers", "steps", "size", "weights", "activations", "scratch", "compiled in", "peak RSS"]
    rows = [_plan_row(manifest, rank, plan) for rank in gpu.ranks for plan in rank.plans]
    return table(headers, rows)


def _plan_row(manifest: EngineManifest, rank: RankRecord, plan: PlanRecord) -> list[str]:
    footprint = plan.footprint
    memory = (footprint.weights_bytes, footprint.activation_bytes, footprint.scratch_bytes, rank.peak_rss_bytes)
    weights, activations, scratch, peak = ("-" if size is None else human_bytes(size) for size in memory)
    return [
        plan.file,
        f"{rank.first_layer}-{rank.first_layer + rank.num_layers - 1}",
        "+".join(plan.modes),
        human_bytes(manifest.files[plan.file].bytes),
        weights,
        activations,
        scratch,
        f"{plan.build_seconds:.1f} s",
        peak,
    ]


def _constants(gpu: GpuEngine) -> str:
    """By type, of all ranks."""
    total = _sum(rank.constants for rank in gpu.ranks)
    rows = [[dtype, human_bytes(size)] for dtype, size in sorted(total.items(), key=lambda item: -item[1])]
    return table(["weights and constants", "bytes"], rows)


def _layers(gpu: GpuEngine) -> str:
    plans = gpu.ranks[0].plans
    names = sorted(_sum(plan.layers for plan in plans))
    rows = [[name, *(plan.layers.get(name, 0) for plan in plans)] for name in names]
    return table([f"layers of rank {gpu.ranks[0].rank}", *("+".join(plan.modes) for plan in plans)], rows)


def _profiles(gpu: GpuEngine) -> str:
    rows = [
        [f"{mode}: {name}", *(_shape(shape) for shape in (range_.min, range_.opt, range_.max))]
        for plan in gpu.ranks[0].plans
        for mode, profile in plan.profiles.items()
        for name, range_ in sorted(profile.items())
    ]
    return table(["profile", "min", "opt", "max"], rows)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total
