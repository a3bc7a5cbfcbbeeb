"""What a target cannot compute of a model: found from the spec alone, before any work is done."""

from __future__ import annotations

from builder.model_spec import ModelSpec
from plansmith_errors import BuildError


def check_supported(target: str, spec: ModelSpec) -> None:
    """Raises BuildError for a model that ``target`` has no kernels for."""
    if target == "cpu" and spec.attention_soft_cap is not None:
        # OpenVINO's PagedAttention has none among its inputs; without it the scores are others.
        raise BuildError(
            f"the cpu target's attention kernel has no soft cap, and this {spec.model_type} model has "
            f"attn_logit_softcapping {spec.attention_soft_cap:g}; set build.target to tensorrt or tensorrt-rtx, or "
            "compute it with torch: plansmith evaluate --reference"
        )
