"""What would fit where nothing does: other weights, more GPUs, or larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from builder.planner.gpu import catalogue
from builder.planner.layout import Layout
from builder.planner.plan import CapacityPlan, Request, plan_capacity
from builder.planner.precision import resolve_recipe
from plansmith_errors import PlansmithError

_SMALLER_WEIGHTS = {"fp8": "fp8", "int8": "int8", "int4": "bf16"}  # and a format of GPUs that take them
_MOST_GPUS = 1024


def what_would_fit(request: Request) -> list[str]:
    """Up to three ways, each in a few words; none where nothing of the catalogue does."""
    fixed = replace(request, tp_size=None, pp_size=None, ep_size=None)
    found = (next(ways, None) for ways in (_other_weights(fixed), _more_gpus(fixed), _larger_gpus(fixed)))
    return [way for way in found if way is not None]


def _other_weights(request: Request) -> Iterator[str]:
    for weights, needed in _SMALLER_WEIGHTS.items():
        if needed not in request.gpu.tflops:
            continue
        recipe, _ = resolve_recipe(weights)
        precision = replace(request.precision, label=weights, recipe=recipe, stored={})
        layout = _smallest(replace(request, precision=precision))
        if layout is not None:
            yield f"--weights {weights} on {layout.parallelism.world_size} x {request.gpu.name}"


def _more_gpus(request: Request) -> Iterator[str]:
    num_gpus = 2 * request.num_gpus
    while num_gpus <= _MOST_GPUS:
        layout = _smallest(replace(request, num_gpus=num_gpus))
        if layout is not None:
            parallelism = layout.parallelism
            yield f"--gpus {parallelism.world_size} (tp {parallelism.tp_size} x pp {parallelism.pp_size})"
        num_gpus *= 2


def _larger_gpus(request: Request) -> Iterator[str]:
    larger = [gpu for gpu in catalogue() if gpu.memory_bytes > request.gpu.memory_bytes]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        if _smallest(replace(request, gpu=gpu)) is not None:
            yield f"--gpu {gpu.name}"


def _smallest(request: Request) -> Layout | None:
    try:
        plan: CapacityPlan = plan_capacity(request)
    except PlansmithError:  # a recipe that does not divide this model is no advice
        return None
    return plan.smallest
