"""What can be said of a build before any work: can this machine make it, and can the model be made so?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from builder.machine import Machine, this_machine
from builder.model_spec import ModelSpec
from builder.options import BuildOptions
from builder.sharding.legality import check_parallelism
from builder.targets.facts import TARGETS, TargetName, library_version, quick_library_version
from builder.targets.support import check_supported
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import StoredWeight


def check_build(options: BuildOptions, spec: ModelSpec, types: Iterable[str] = ()) -> None:
    """Raise BuildError where a build of ``spec`` cannot work: model, library, GPUs asked for, division over ranks.

    ``types`` are the schemes of its weights and of the inputs of its linears, as far as they are known.
    """
    check_supported(options.target, spec)
    require_library(options.target)
    if not TARGETS[options.target].is_gpu:
        return
    check_parallelism(spec, options.parallelism)
    sms = resolve_sms(options)
    if options.target != "cpu":
        from builder.targets.tensorrt.legality import check_types

        check_types((options.resolved_dtype, *types), sms, options.target)


def stored_types(weights: Iterable[StoredWeight]) -> list[str]:
    """Schemes of quantized weights and of the inputs of their linears, each once."""
    found = [scheme for weight in weights for scheme in (weight.scheme, getattr(weight.activations, "scheme", "none"))]
    return list(dict.fromkeys(found))


def build_identity(options: BuildOptions) -> dict[str, Any]:
    """What tells this build from others beside its source and our code: settings, GPUs and the compiling library.

    Raises BuildError where the GPUs are to be this machine's and it has none.
    """
    identity: dict[str, Any] = {
        "options": options.what_is_built(),
        "library": {TARGETS[options.target].library: quick_library_version(options.target)},
    }
    if TARGETS[options.target].is_gpu:
        identity["sms"] = resolve_sms(options)
    return identity


def require_library(target: TargetName) -> str:
    """Version of the library that compiles for ``target``. Raises BuildError where there is none."""
    facts, version = TARGETS[target], library_version(target)
    if version is None:
        raise BuildError(
            f"target {target} needs {facts.label}, which is not installed; run: pip install '{facts.install}'"
        )
    return version


def resolve_sms(options: BuildOptions, machine: Machine | None = None) -> tuple[int, ...]:
    """The compute capabilities to compile for: those asked for, else those of this machine's GPUs. Raises BuildError.

    A target that compiles on a GPU alone needs that GPU here.
    """
    facts = TARGETS[options.target]
    if options.sms is not None and facts.is_ahead_of_time:
        return options.sms
    machine = machine or this_machine(options.target)
    legal = ", ".join(map(str, facts.sms))
    if not machine.gpus:
        raise BuildError(
            f"target {facts.name} compiles on the GPU that it serves; this machine has {machine.describe_gpus()}: "
            "build there, or with build.target tensorrt-rtx for the GPUs that it serves"
            if not facts.is_ahead_of_time
            else f"build.sms is not set, and this machine has {machine.describe_gpus()} to take it from; "
            f"name compute capabilities of the GPUs that will serve, of {legal}, as in --set 'build.sms=[89]'"
        )
    found = tuple(sm for sm in machine.sms if sm in facts.sms and (options.sms is None or sm in options.sms))
    if not found or (len(found) > 1 and not facts.is_ahead_of_time):
        wanted = legal if options.sms is None else ", ".join(map(str, options.sms))
        raise BuildError(
            f"target {facts.name} is to compile for one of {wanted}, and this machine has {machine.describe_gpus()}; "
            "name in build.sms one that it has"
        )
    return found
