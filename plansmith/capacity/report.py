"""A capacity plan as data for scripts; text and plot are made of the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from builder.parallel import Parallelism
from builder.planner.layout import Layout
from builder.planner.plan import CapacityPlan, Request
from builder.planner.precision import missing_formats
from builder.planner.roofline import StepTime
from builder.planner.stage import pipeline_stages


def describe(plan: CapacityPlan, source: str) -> dict[str, Any]:
    """Bytes, seconds and tokens; a layout that does not fit has no speed."""
    request, smallest = plan.request, plan.smallest
    return {
        "model": _model(request, source),
        "weights": _weights(request),
        "kv_cache": {"dtype": request.precision.kv_cache, "bytes_per_token": _kv_bytes_per_token(request)},
        "gpu": {**request.gpu.model_dump(mode="json"), "memory_bytes": request.gpu.memory_bytes},
        "num_gpus": request.num_gpus,
        "limits": asdict(request.limits),
        "workload": asdict(request.workload),
        "layouts": [_layout(layout, request.num_gpus) for layout in plan.layouts],
        "smallest": None if smallest is None else asdict(smallest.parallelism),
        "notes": _notes(plan),
    }


def _model(request: Request, source: str) -> dict[str, Any]:
    shape = request.shape
    return {
        "source": source,
        "architecture": shape.model_type,
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "num_layers": shape.num_layers,
        "has_experts": shape.has_experts,
        "can_be_built": shape.why_not_built is None,
    }


def _weights(request: Request) -> dict[str, Any]:
    (whole,) = pipeline_stages(request.shape, request.precision, Parallelism())
    return {
        "precision": request.precision.label,
        "nbytes": whole.weight_bytes,
        "bytes_per_parameter": whole.weight_bytes / request.shape.num_parameters,
    }


def _kv_bytes_per_token(request: Request) -> int:
    """Of all layers, on GPUs that share nothing twice."""
    return request.precision.kv_bytes * sum(layer.attention.kv_elements(1) for layer in request.shape.layers)


def _layout(layout: Layout, num_gpus: int) -> dict[str, Any]:
    parallelism, fits = layout.parallelism, layout.fits
    return {
        **asdict(parallelism),
        "num_gpus": parallelism.world_size,
        "num_copies": num_gpus // parallelism.world_size,
        "fits": fits,
        "tightest_stage": layout.tightest,
        "memory": asdict(layout.footprint),
        "num_tokens": layout.num_tokens,
        "num_sequences": layout.num_sequences,
        "largest_batch": layout.largest_batch,
        "decode": _step(layout.decode(layout.batch_size)) if fits else None,
        "decode_one": _step(layout.decode(1)) if fits else None,
        "prefill": _step(layout.prefill) if fits else None,
    }


def _step(step: StepTime) -> dict[str, Any]:
    return {
        **asdict(step),
        "seconds": step.seconds,
        "seconds_per_token": step.seconds / step.num_tokens,
        "tokens_per_second": step.tokens_per_second,
        "bound": step.bound,
    }


def _notes(plan: CapacityPlan) -> list[str]:
    request, gpu, smallest = plan.request, plan.request.gpu, plan.smallest
    notes = []
    if request.shape.why_not_built is not None:
        notes.append(f"{request.shape.why_not_built}; the plan is for run-times that have it")
    missing = missing_formats(request.precision, gpu)
    if missing:
        names = " and ".join(missing)
        notes.append(f"sm{gpu.sm} does not multiply {names}: such weights are unpacked and multiplied in 16 bits")
    if request.precision.kv_cache == "fp8":
        notes.append("TensorRT-RTX builds no FP8 KV cache: there, int8 takes as much")
    windows = [layer.attention.window for layer in request.shape.layers if layer.attention.window is not None]
    if windows and min(windows) < request.workload.context:
        notes.append(
            f"{len(windows)} layers see {min(windows)} tokens at most, yet keep all: layers share their block tables"
        )
    if smallest is not None and smallest.num_sequences > request.limits.max_batch_size:
        notes.append(
            f"a step takes max_batch_size {request.limits.max_batch_size} of {smallest.num_sequences} sequences; "
            f"{smallest.largest_batch} would fit"
        )
    if gpu.nvlink is not None and any(layout.parallelism.tp_size > gpu.nvlink_gpus for layout in plan.layouts):
        notes.append(f"NVLink joins {gpu.nvlink_gpus} GPUs: a larger tp_size is timed over PCIe, a network adds to it")
    return notes
