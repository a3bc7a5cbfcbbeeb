"""Models with experts: what their fused kernels load, from vllm's and sglang's compressed_tensors_moe.py."""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.options import LABELS, Consumer, Format
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource

_CONSUMERS: tuple[Consumer, ...] = ("vllm", "sglang")


def check_experts(layout: Format, consumer: Consumer, source: ExportSource) -> None:
    """Raises ExportError for a model with experts that ``consumer`` is not known to load as it is stored."""
    if source.shape.mixture is None or layout == "trtllm":  # of which trtllm_checks knows
        return
    family = source.shape.model_type
    if layout != "compressed-tensors" or consumer not in _CONSUMERS:
        raise ExportError(
            f"{family} models, which have experts, are exported in the format compressed-tensors for "
            f"{' and '.join(LABELS[name] for name in _CONSUMERS)} and in the format trtllm, not as {layout!r} for "
            f"{LABELS[consumer]}"
        )
    experts = {name: scheme for name, scheme in source.schemes.items() if ".experts." in name}
    for name, scheme in experts.items():
        if scheme.name != "none" and scheme not in (LinearScheme("int4", scheme.group_size), LinearScheme("fp8")):
            raise ExportError(
                f"{LABELS[consumer]} is not known to load experts stored as {scheme}; "
                "take the recipe int4-rtn-sym or fp8"
            )
        if scheme.name == "none":
            raise ExportError(
                f"{name!r} is not quantized; run-times stack the experts of a layer in one tensor, "
                "so give all of them the scheme of the other linears"
            )


def router_modules(source: ExportSource) -> list[str]:
    """Linears of the decoder that are never quantized, without ".weight"."""
    mixture = source.shape.mixture
    if mixture is None:
        return []
    return [f"model.layers.{layer}.{mixture.router}" for layer, sparse in enumerate(mixture.sparse_layers) if sparse]
