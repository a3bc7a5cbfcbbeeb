"""The one scheme in which a checkpoint's linear layers are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plansmith_errors import ExportError
from quantize.activations import Activations, activations_of
from quantize.checkpoint import Checkpoint
from quantize.model_shape import FUSED_SETS, ModelShape

EXPORTED = ("int4", "int8", "fp8", "none")


@dataclass(frozen=True)
class LinearScheme:
    """``group_size``: input columns that share a scale (int4, block formats). ``granularity``: of fp8's scales.

    ``activations``: what happens to the inputs; ``has_pre_quant_scale``: they are multiplied by stored factors before.
    """

    name: str
    group_size: int | None = None
    symmetric: bool = True
    granularity: str = "channel"
    activations: Activations | None = None
    has_pre_quant_scale: bool = False

    def __str__(self) -> str:
        return self._weights if self.activations is None else f"{self._weights} with {self.activations}"

    @property
    def _weights(self) -> str:
        if self.name == "fp8" and self.granularity != "channel":
            return f"fp8 with one scale per {self.granularity}"
        if self.name != "int4":
            return {"none": "not quantized"}.get(self.name, self.name)
        return f"int4 {'symmetric' if self.symmetric else 'asymmetric'} in groups of {self.group_size}"


NOT_QUANTIZED = LinearScheme("none")


def scheme_of(entry: Mapping[str, Any]) -> LinearScheme:
    """The scheme that an entry of ``quantization_config.tensors`` describes. Raises ValueError for odd activations."""
    name = str(entry.get("scheme", "none"))
    symmetric = name != "int4" or entry.get("symmetric") is True
    return LinearScheme(
        name,
        entry.get("group_size"),
        symmetric,
        str(entry.get("granularity", "channel")),
        activations_of(entry),
        entry.get("pre_quant_scale") is True,
    )


def linear_schemes(checkpoint: Checkpoint, shape: ModelShape) -> dict[str, LinearScheme]:
    """The scheme of every linear weight of the decoder, by name. Raises ExportError for one that is not exported."""
    config = checkpoint.config.get("quantization_config") or {}
    entries = config.get("tensors") or {}
    schemes = {}
    for name, _ in shape.linear_weights():
        scheme = schemes[name] = scheme_of(entries.get(name) or {})
        if scheme.name not in EXPORTED or scheme.granularity != "channel":
            raise ExportError(f"tensor {name!r} is {scheme}; exported are int4, int8 and fp8 with a scale per channel")
        if scheme.activations is not None or scheme.has_pre_quant_scale:
            raise ExportError(f"tensor {name!r} is {scheme}; quantized activations are not exported")
    if "kv_cache" in config:
        raise ExportError(f"the checkpoint has scales of the KV cache ({config['kv_cache']}); they are not exported")
    return schemes


def common_scheme(schemes: Mapping[str, LinearScheme]) -> LinearScheme:
    """The scheme of all linears that are quantized. Raises ExportError when there are several, or none at all is shared
    by a set that run-times fuse into one matrix (q, k, v; gate, up)."""
    quantized = {name: scheme for name, scheme in schemes.items() if scheme != NOT_QUANTIZED}
    found = list(dict.fromkeys(quantized.values()))
    if len(found) > 1:
        other = next(name for name, scheme in quantized.items() if scheme == found[1])
        raise ExportError(
            f"linears are stored as {found[0]} and as {found[1]} ({other!r} and others); "
            "an export has one scheme besides unquantized layers; quantize with one scheme for all linears"
        )
    _check_fused(schemes)
    return found[0] if found else NOT_QUANTIZED


def _check_fused(schemes: Mapping[str, LinearScheme]) -> None:
    for name, scheme in schemes.items():
        for members in FUSED_SETS:
            first = next((member for member in members if f".{member}." in name), None)
            if first is None:
                continue
            for other in (name.replace(first, member) for member in members):
                if schemes[other] != scheme:
                    raise ExportError(
                        f"{name!r} is {scheme} but {other!r} is {schemes[other]}; "
                        "run-times multiply them as one matrix; give both the same rule in the recipe"
                    )
