"""The survey as tables for a reader."""

from __future__ import annotations

from plansmith.console import human_bytes, table
from plansmith.doctor.abilities import Ability
from plansmith.doctor.survey import Survey

_YES_NO = {True: "yes", False: "no"}


def survey_text(found: Survey) -> str:
    """What it can, then for which GPUs, then what it is made of."""
    return "\n\n".join([_targets(found), _sms(found), _machine(found), _libraries(found)])


def _targets(found: Survey) -> str:
    rows = [[each.target, _say(each.compile), _say(each.load), _say(each.serve)] for each in found.targets]
    reasons = {
        f"{each.target}: {ability.why}"
        for each in found.targets
        for ability in (each.compile, each.load, each.serve)
        if not ability.can
    }
    return "\n".join([table(["target", "compile", "load", "serve"], rows, numbers=False), *sorted(reasons)])


def _sms(found: Survey) -> str:
    targets = list(found.sms[0].compile)
    rows = [
        [f"sm{each.sm}", each.gpus, *(_say(each.compile[name]) for name in targets), ", ".join(each.types) or "-"]
        for each in found.sms
    ]
    reasons = _grouped([(name, each.sm, each.compile[name].why) for name in targets for each in found.sms])
    return "\n".join([table(["compile for", "as in", *targets, "types (tensorrt-rtx)"], rows, numbers=False), *reasons])


def _grouped(reasons: list[tuple[str, int, str]]) -> list[str]:
    """One line for all compute capabilities of which a target has the same to say."""
    sms: dict[tuple[str, str], list[int]] = {}
    for target, sm, why in reasons:
        sms.setdefault((target, why), []).append(sm)
    return [f"{target}, {', '.join(f'sm{sm}' for sm in those)}: {why}" for (target, why), those in sms.items()]


def _machine(found: Survey) -> str:
    memory = found.memory
    ram = (
        "unknown"
        if memory is None
        else f"{human_bytes(memory.available_bytes)} free of {human_bytes(memory.total_bytes)}"
    )
    python = "" if found.python_is_supported else " (3.10 to 3.12 are supported)"
    native = "compiled" if found.has_native_kernels else "NumPy's, several times slower: install a C compiler and again"
    rows = [
        ["plansmith", found.plansmith],
        ["Python", f"{found.python}{python}"],
        ["system", f"{found.system}, {found.num_cpus} CPUs"],
        ["RAM", ram],
        ["disk", f"{human_bytes(found.disk_free_bytes)} free here"],
        ["rounding", native],
        ["Triton", found.triton.executable or f"no: {found.triton.problem}"],
        *_gpus(found),
    ]
    return table(["this machine", ""], rows, numbers=False)


def _gpus(found: Survey) -> list[list[str]]:
    machine = found.machine
    if not machine.gpus:
        return [["GPUs", machine.describe_gpus()]]
    cuda = ".".join(map(str, machine.cuda_version)) if machine.cuda_version else "unknown"
    rows = [["GPU driver", f"{machine.driver_version or 'unknown'}, CUDA {cuda}"]]
    for gpu in machine.gpus:
        free = "" if gpu.free_bytes is None else f", {human_bytes(gpu.free_bytes)} free"
        rows.append([f"GPU {gpu.index}", f"{gpu.name}, sm{gpu.sm}, {human_bytes(gpu.memory_bytes)}{free}"])
    return rows


def _libraries(found: Survey) -> str:
    rows = [
        [each.name, each.version or "-", each.use if each.version else f"{each.use}: pip install '{each.install}'"]
        for each in found.libraries
    ]
    return table(["library", "version", "for"], rows, numbers=False)


def _say(ability: Ability) -> str:
    return _YES_NO[ability.can]
