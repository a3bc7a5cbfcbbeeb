"""The one scheme in which a checkpoint's linear layers are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plansmith_errors import ExportError
from quantize.activations import Activations, activations_of
from quantize.checkpoint import Checkpoint
from quantize.model_shape import FUSED_SETS, ModelShape


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
            return {"none": "not quantized", "mixed": "in several schemes"}.get(self.name, self.name)
        return f"int4 {'symmetric' if self.symmetric else 'asymmetric'} in groups of {self.group_size}"


NOT_QUANTIZED = LinearScheme("none")
MIXED = LinearScheme("mixed")  # of a whole model


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
    """The scheme of every linear weight of the decoder, by name. Raises ExportError for unknown activations."""
    config = checkpoint.config.get("quantization_config") or {}
    entries = config.get("tensors") or {}
    try:
        return {name: scheme_of(entries.get(name) or {}) for name, _ in shape.linear_weights()}
    except ValueError as error:
        raise ExportError(f"{checkpoint.path}: quantization_config: {error}") from None


def common_scheme(schemes: Mapping[str, LinearScheme]) -> LinearScheme:
    """The scheme of all linears that are quantized, MIXED where there are several. Raises ExportError when a set that
    run-times fuse into one matrix (q, k, v; gate, up) does not share one."""
    _check_fused(schemes)
    found = list(dict.fromkeys(scheme for scheme in schemes.values() if scheme != NOT_QUANTIZED))
    if len(found) > 1:
        return MIXED
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
