"""Plans of published models in one call."""

from typing import Any

from builder.planner.footprint import StepLimits
from builder.planner.from_config import read_decoder_shape
from builder.planner.gpu import find_gpu
from builder.planner.layout import Workload
from builder.planner.plan import CapacityPlan, Request, plan_capacity
from builder.planner.precision import Precision, resolve_recipe


def precision(weights: str = "bf16", kv_cache: Any = "bf16") -> Precision:
    recipe, floats = resolve_recipe(weights)
    return Precision(weights, recipe, kv_cache, floats or "bfloat16")


def plan(
    config: dict[str, Any],
    gpu: str = "h100-80g",
    num_gpus: int = 8,
    weights: str = "bf16",
    kv_cache: Any = "bf16",
    context: int = 4096,
    batch_size: int = 1,
    **changes: Any,
) -> CapacityPlan:
    sizes = {name: changes.pop(name) for name in ("tp_size", "pp_size", "ep_size") if name in changes}
    limits = StepLimits(**{"max_batch_size": 32, "max_num_tokens": 2048, "max_seq_len": context, **changes})
    return plan_capacity(
        Request(
            shape=read_decoder_shape(config),
            precision=precision(weights, kv_cache),
            gpu=find_gpu(gpu),
            num_gpus=num_gpus,
            limits=limits,
            workload=Workload(context, batch_size),
            **sizes,
        )
    )
