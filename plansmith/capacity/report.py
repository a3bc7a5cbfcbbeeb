"""A capacity plan as data for scripts; text and plot are made of the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from builder.parallel import Parallelism
from builder.planner.layout import Layout
from builder.planner.plan import CapacityPlan, Request
from builder.planner.precision import missing_formats, uncompiled_schemes
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
    return [*_model_notes(plan.request), *_engine_notes(plan)]


def _model_notes(request: Request) -> Iterator[str]:
    """What of the model or its precision the build or the GPU does not honour."""
    if request.shape.why_not_built is not None:
        yield f"{request.shape.why_not_built}; it is planned as if it could"
    missing = missing_formats(request.precision, request.gpu)
    if "bf16" in missing:
        missing.remove("bf16")
        yield f"sm{request.gpu.sm} has no bf16: build in float16, which takes as much"
    if missing:
        names = " and ".join(missing)
        yield f"sm{request.gpu.sm} does not multiply {names}: timed as if unpacked and multiplied in 16 bits"
    uncompiled = uncompiled_schemes(request.precision, request.gpu)
    if uncompiled:
        yield f"TensorRT-RTX does not compile {' and '.join(uncompiled)} for sm{request.gpu.sm}"
    if request.precision.kv_cache == "fp8":
        yield "TensorRT-RTX builds no FP8 KV cache: there, int8 takes as much"
    windows = [layer.attention.window for layer in request.shape.layers if layer.attention.window is not None]
    if windows and min(windows) < request.workload.context:
        yield f"{len(windows)} layers see {min(windows)} tokens at most, yet keep all: layers share their block tables"
    if request.shape.has_experts:
        yield "times are of chosen experts alone; the TensorRT targets compute all experts for every token"


def _engine_notes(plan: CapacityPlan) -> Iterator[str]:
    """What of the smallest layout's memory the limits of the engine leave unused, and what is timed too well."""
    gpu, limits, smallest = plan.request.gpu, plan.request.limits, plan.smallest
    if smallest is not None and smallest.num_sequences > limits.max_batch_size:
        yield (
            f"a step takes max_batch_size {limits.max_batch_size} of {smallest.num_sequences} sequences; "
            f"{smallest.largest_batch} would fit"
        )
    if smallest is not None and smallest.num_tokens > smallest.most_tokens:
        yield (
            f"the pools of an engine with these limits hold {smallest.most_tokens} tokens at most, memory "
            f"{smallest.num_tokens}: a larger max_batch_size uses it"
        )
    if gpu.nvlink is not None and any(layout.parallelism.tp_size > gpu.nvlink_gpus for layout in plan.layouts):
        yield f"NVLink joins {gpu.nvlink_gpus} GPUs: a larger tp_size is timed over PCIe, a network adds to it"
