"""What plans with external weights depend on of a checkpoint: everything but the values."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from builder.model_spec import ModelSpec

if TYPE_CHECKING:
    from quantize import Checkpoint

_LAYOUT_KEYS = ("scheme", "group_size", "granularity", "symmetric", "activations", "pre_quant_scale")


def plan_layout(checkpoint: Checkpoint) -> dict[str, Any]:
    """Architecture, scheme and shape of each weight, as plain data: the same for every fine-tune of one shape."""
    quantization: dict[str, Any] = checkpoint.config.get("quantization_config") or {}
    return {
        "model": asdict(ModelSpec.from_hf_config(checkpoint.config)),
        "kv_cache": quantization.get("kv_cache"),
        "schemes": {
            name: {key: entry[key] for key in _LAYOUT_KEYS if key in entry}
            for name, entry in quantization.get("tensors", {}).items()
        },
        "tensors": {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in checkpoint},
    }
