"""What happens to the inputs of a linear, and to keys and values, beside the rounding of weights.

The tensors that say so are named as ModelOpt names them: ``X.input_scale``, ``X.pre_quant_scale``, ``k_proj.k_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ActivationScheme = Literal["fp8", "int8", "nvfp4"]
ActivationScale = Literal["static", "token"]
KvScheme = Literal["fp8", "int8"]

# The largest quantized value: a static scale is the largest magnitude seen in calibration divided by it. nvfp4 has one
# scale of the tensor, and scales of blocks that are found as it runs: 6 * 448.
LARGEST: dict[str, float] = {"fp8": 448.0, "int8": 127.0, "nvfp4": 2688.0}
KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
COMPANIONS = (".input_scale", ".pre_quant_scale", *(f".{name}" for name in KV_SCALES.values()))


@dataclass(frozen=True)
class Activations:
    """``static``: one scale for the tensor, stored; ``token``: one for each token, found as it runs."""

    scheme: ActivationScheme
    scale: ActivationScale

    def __str__(self) -> str:
        return f"{self.scale} {self.scheme} activations" if self.scale == "static" else f"{self.scheme} per token"

    def entry(self) -> dict[str, str]:
        """As ``quantization_config`` says it."""
        return {"scheme": self.scheme, "scale": self.scale}


def activations_of(entry: Mapping[str, Any]) -> Activations | None:
    """What an entry of ``quantization_config.tensors`` says. Raises ValueError for what no version wrote."""
    found = entry.get("activations")
    if found is None:
        return None
    if (
        not isinstance(found, dict)
        or found.get("scheme") not in LARGEST
        or found.get("scale") not in ("static", "token")
    ):
        raise ValueError(f"activations are {found!r}, expected a scheme of {', '.join(LARGEST)} and a scale")
    return Activations(found["scheme"], found["scale"])


def input_scale_name(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.input_scale"


def pre_quant_scale_name(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.pre_quant_scale"


def kv_scale_name(weight: str) -> str | None:
    """Of a k_proj or v_proj weight; None for every other."""
    module = weight.removesuffix(".weight")
    name = KV_SCALES.get(module.rpartition(".")[2])
    return f"{module}.{name}" if name is not None and ".self_attn." in module else None
