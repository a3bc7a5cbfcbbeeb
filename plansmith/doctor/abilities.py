"""What a machine can do with each target, and for each compute capability."""

from __future__ import annotations

from dataclasses import dataclass

from builder.machine import Machine
from builder.targets.facts import RUN_TIME, SM_NAMES, TARGETS, TargetFacts, TargetName
from builder.targets.tensorrt.legality import RTX_TYPES


@dataclass(frozen=True)
class Ability:
    """``why`` says what is missing where it cannot, and with what where it can."""

    can: bool
    why: str


@dataclass(frozen=True)
class TargetAbility:
    target: TargetName
    compile: Ability
    load: Ability
    serve: Ability


@dataclass(frozen=True)
class SmAbility:
    sm: int
    gpus: str  # some that have it
    types: tuple[str, ...]  # of weights and activations that tensorrt-rtx compiles; none where it does not
    compile: dict[TargetName, Ability]


def target_abilities(machine: Machine, why_no_triton: str | None) -> tuple[TargetAbility, ...]:
    return tuple(_target_ability(facts, machine, why_no_triton) for facts in TARGETS.values())


def sm_abilities(machine: Machine) -> tuple[SmAbility, ...]:
    gpu_targets = [facts for facts in TARGETS.values() if facts.is_gpu]
    return tuple(
        SmAbility(
            sm, gpus, RTX_TYPES.get(sm, ()), {facts.name: _compile_for(facts, sm, machine) for facts in gpu_targets}
        )
        for sm, gpus in SM_NAMES.items()
    )


def _target_ability(facts: TargetFacts, machine: Machine, why_no_triton: str | None) -> TargetAbility:
    load = _load(facts, machine)
    serve = load if why_no_triton is None or not load.can else Ability(False, why_no_triton)
    return TargetAbility(facts.name, _compile(facts, machine), load, serve)


def _compile(facts: TargetFacts, machine: Machine) -> Ability:
    library = _has_library(facts, machine)
    if not library.can or facts.is_ahead_of_time:
        return library
    return library if machine.gpus else Ability(False, f"compiles on a GPU alone: {machine.describe_gpus()}")


def _load(facts: TargetFacts, machine: Machine) -> Ability:
    library = _has_library(facts, machine)
    if not library.can or not facts.is_gpu:
        return library
    if not set(machine.sms) & set(facts.sms):
        return Ability(False, machine.describe_gpus())
    missing = [name for name in RUN_TIME if name not in machine.libraries]
    if missing:
        return Ability(False, f"{' and '.join(missing)} not installed: pip install 'plansmith[gpu]'")
    return library


def _has_library(facts: TargetFacts, machine: Machine) -> Ability:
    version = machine.libraries.get(facts.library)
    if version is None:
        return Ability(False, f"{facts.label} is not installed: pip install '{facts.install}'")
    return Ability(True, f"{facts.library} {version}")


def _compile_for(facts: TargetFacts, sm: int, machine: Machine) -> Ability:
    if sm not in facts.sms:
        return Ability(False, f"{facts.library} does not compile for it")
    library = _has_library(facts, machine)
    if not library.can:
        return library
    if facts.is_ahead_of_time:
        return Ability(True, "without a GPU")
    return Ability(sm in machine.sms, "on this GPU" if sm in machine.sms else "only on a machine with such a GPU")
