"""What an engine needs against what a machine has: refused before any memory is touched, with the nearest way out.

Engines of TensorRT and TensorRT-RTX load in the very release that built them, on the compute capabilities that they
were compiled for (docs.nvidia.com/deeplearning/tensorrt-rtx: Engine Compatibility).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from builder.gpu_manifest import GpuEngine
from builder.machine import Gpu, Machine, this_machine
from builder.manifest import EngineManifest, check_files, read_manifest
from builder.targets.facts import RUN_TIME, TARGETS, TargetFacts, TargetName
from plansmith_errors import EngineError

_OLDEST_DRIVER = {12: 535, 13: 580}  # of each CUDA release; docs.nvidia.com/deeplearning/tensorrt: Prerequisites


def check_machine(path: Path, manifest: EngineManifest, machine: Machine | None = None) -> Machine:
    """Return ``machine`` (this one), or raise EngineError, one line, where it cannot load the engine in ``path``."""
    facts = TARGETS.get(manifest.target)
    machine = machine or this_machine(None if facts is None else facts.name)
    for problem in incompatibilities(manifest, machine):
        raise EngineError(f"{path}: {problem}")
    return machine


def engine_problems(path: Path, machine: Machine | None = None) -> Iterator[str]:
    """Everything that keeps ``machine`` (this one) from loading the engine in ``path``, damage first."""
    try:
        manifest = read_manifest(path)
        if manifest.gpu is None:
            check_files(path, manifest, required=())
        else:
            check_gpu_files(path, manifest)
    except EngineError as error:
        yield str(error)
        return
    yield from incompatibilities(manifest, machine)


def check_gpu_files(path: Path, manifest: EngineManifest) -> GpuEngine:
    """Every rank is there, and every file is what the manifest says, to the last byte. Raises EngineError."""
    gpu = _gpu_part(path, manifest)
    found = [record.rank for record in gpu.ranks]
    for rank in range(gpu.parallelism.world_size):
        if rank not in found:
            raise EngineError(
                f"{path}: rank {rank} of {gpu.parallelism.world_size} is missing from engine.json; "
                "build the engine again"
            )
    check_files(path, manifest, required=[name for record in gpu.ranks for name in record.file_names])
    return gpu


def incompatibilities(manifest: EngineManifest, machine: Machine | None = None) -> Iterator[str]:
    """One line for each thing that keeps ``machine`` (this one) from loading the engine, the first to mend first."""
    facts = TARGETS.get(manifest.target)
    if facts is None:
        yield f"built for target {manifest.target!r}; this version loads: {', '.join(TARGETS)}"
        return
    machine = machine or this_machine(facts.name)
    yield from _library(manifest, facts, machine)
    if manifest.gpu is not None:
        yield from _gpus(manifest.gpu, facts, machine)


def why_not_run(manifest: EngineManifest, machine: Machine | None = None) -> str | None:
    """What keeps ``machine`` (this one) from running the engine, on one line; None where nothing does."""
    return next(incompatibilities(manifest, machine), None)


def check_target_runs(target: TargetName, machine: Machine | None = None) -> None:
    """Raise EngineError where no engine of ``target`` can run on ``machine`` (this one), whatever it is built for."""
    facts = TARGETS[target]
    machine = machine or this_machine(target)
    if facts.library not in machine.libraries:
        raise EngineError(
            f"target {target} needs {facts.label}, which is not installed; run: pip install '{facts.install}'"
        )
    if facts.is_gpu and not machine.gpus:
        raise EngineError(f"engines of target {target} run on a GPU; this machine has {machine.describe_gpus()}")
    problem = next(_run_time(machine, 1), None) if facts.is_gpu else None
    if problem is not None:
        raise EngineError(f"target {target} {problem}")


def suitable_gpus(gpu: GpuEngine, machine: Machine) -> list[Gpu]:
    """Those that the engine was compiled for, in CUDA's order; the first ``world_size`` take its ranks."""
    return [each for each in machine.gpus if each.sm in gpu.sms]


def _gpu_part(path: Path, manifest: EngineManifest) -> GpuEngine:
    if manifest.gpu is None:
        raise EngineError(f"{path}: engine.json has no section gpu; build the engine again")
    return manifest.gpu


def _library(manifest: EngineManifest, facts: TargetFacts, machine: Machine) -> Iterator[str]:
    expected, found = manifest.library.get(facts.library), machine.libraries.get(facts.library)
    if found is None:
        install = f"{facts.library}=={expected}" if facts.is_gpu else facts.install
        yield f"target {facts.name} needs {facts.label}, which is not installed; run: pip install '{install}'"
    elif found != expected:
        yield (
            f"built for {facts.library} {expected}, found {found}; "
            f"install it (pip install {facts.library}=={expected}) or build the engine again"
        )


def _gpus(gpu: GpuEngine, facts: TargetFacts, machine: Machine) -> Iterator[str]:
    wanted = " or ".join(f"sm{sm}" for sm in gpu.sms)
    world = gpu.parallelism.world_size
    if not machine.gpus:
        yield (
            f"needs {_count(world)} of {wanted}; this machine has {machine.describe_gpus()}: "
            "serve it where there is one, or build for this machine with --set build.target=cpu"
        )
        return
    yield from _driver(facts, machine)
    yield from _run_time(machine, world)
    suitable = suitable_gpus(gpu, machine)
    if not suitable:
        yield f"built for {wanted}; this machine has {machine.describe_gpus()}: {_nearest(facts, machine)}"
    elif len(suitable) < world:
        yield (
            f"needs {_count(world)} of {wanted} (tp_size {gpu.tp_size} x pp_size {gpu.pp_size}), this machine has "
            f"{len(suitable)}: build with {_smaller(gpu, len(suitable))}"
        )
    else:
        yield from _memory(gpu, suitable)


def _run_time(machine: Machine, world: int) -> Iterator[str]:
    missing = [name for name in RUN_TIME[: 2 if world > 1 else 1] if name not in machine.libraries]
    if missing:
        yield f"needs {' and '.join(missing)}, not installed; run: pip install 'plansmith[gpu]'"


def _driver(facts: TargetFacts, machine: Machine) -> Iterator[str]:
    cuda = machine.library_cuda.get(facts.library)
    if cuda is None or machine.cuda_version is None or machine.cuda_version[0] >= cuda:
        return
    release, minor = machine.cuda_version
    found = f"{machine.driver_version or 'one'} (CUDA {release}.{minor})"
    yield (
        f"{facts.library} for CUDA {cuda} needs a driver of release {_OLDEST_DRIVER[cuda]} or later, found {found}; "
        "update the driver"
    )


def _nearest(facts: TargetFacts, machine: Machine) -> str:
    """The supported combination that is closest to what was tried."""
    for target in (facts, TARGETS["tensorrt-rtx"], TARGETS["tensorrt"]):
        served = [sm for sm in machine.sms if sm in target.sms]
        if not served:
            continue
        change = "" if target is facts else f"--set build.target={target.name} "
        if target.is_ahead_of_time:
            return f"build with {change}--set 'build.sms=[{','.join(map(str, served))}]'"
        return f"build with {change}--set 'build.sms=[{served[0]}]' on this machine"
    return f"no target compiles for it; supported: {', '.join(f'sm{sm}' for sm in TARGETS['tensorrt'].sms)}"


def _smaller(gpu: GpuEngine, available: int) -> str:
    """The largest division of the same kind that the GPUs suffice for."""
    legal = [
        (tp_size * pp_size, tp_size, pp_size)
        for tp_size in range(1, gpu.tp_size + 1)
        for pp_size in range(1, gpu.pp_size + 1)
        if gpu.tp_size % tp_size == 0 and tp_size * pp_size <= available
    ]
    _, tp_size, pp_size = max(legal)
    return f"--set build.tp_size={tp_size} --set build.pp_size={pp_size}"


def _memory(gpu: GpuEngine, suitable: list[Gpu]) -> Iterator[str]:
    for record, device in zip(sorted(gpu.ranks, key=lambda record: record.rank), suitable, strict=False):
        room = device.memory_bytes if device.free_bytes is None else device.free_bytes
        if record.gpu_bytes + record.kv_bytes_per_block > room:
            kind = "" if device.free_bytes is None else " free"
            yield (
                f"rank {record.rank} needs {_gib(record.gpu_bytes)} of GPU memory and its KV cache, "
                f"GPU {device.index} ({device.name}) has {_gib(room)}{kind}: free it, "
                "or build with a larger build.tp_size or fewer bits per weight"
            )


def _count(number: int) -> str:
    return "a GPU" if number == 1 else f"{number} GPUs"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
