"""A model that does not fit: what it lacks, and what would fit, in one line."""

from __future__ import annotations

from builder.planner.advice import what_would_fit
from builder.planner.plan import CapacityPlan
from plansmith.console import human_bytes
from plansmith_errors import BuildError


def check_fits(plan: CapacityPlan) -> None:
    """Raises BuildError where no layout of the plan holds the workload."""
    if plan.smallest is not None:
        return
    request = plan.request
    ways = what_would_fit(request)
    advice = f"what would fit: {'; '.join(ways)}" if ways else "ask for less context or fewer sequences"
    raise BuildError(
        f"{request.workload.batch_size} x {request.workload.context} tokens with {request.precision.label} weights do "
        f"not fit on {request.num_gpus} x {request.gpu.name}: {_found(plan)}; {advice}"
    )


def _found(plan: CapacityPlan) -> str:
    """Of the layout that comes nearest."""
    best = max(plan.layouts, key=lambda layout: (layout.num_sequences, layout.footprint.kv_cache))
    memory, parallelism = best.footprint, best.parallelism
    if best.num_sequences:
        return f"at most {best.num_sequences} sequences find room"
    used = memory.weights + memory.activations + memory.logits + memory.reserved
    return (
        f"tp_size {parallelism.tp_size} x pp_size {parallelism.pp_size} needs {human_bytes(used)} of a GPU's "
        f"{human_bytes(memory.memory)} before the KV cache"
    )
