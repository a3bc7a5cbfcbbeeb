"""Which run-times have code for the families that not all of them have.

From their own registries: vllm/model_executor/models/registry.py, sglang/srt/models, tensorrt_llm/_torch/models.
"""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.options import LABELS, Consumer
from quantize.export.source import ExportSource

_LOADED_BY: dict[str, tuple[Consumer, ...]] = {
    "phi3": ("vllm", "modelopt"),  # the others are not known to read scales of fused projections
    "gemma2": ("vllm", "sglang", "modelopt"),
    "gemma3_text": ("vllm", "sglang", "modelopt", "tensorrt-llm"),
    "granite": ("vllm", "sglang", "modelopt"),
}


def check_family(consumer: Consumer, source: ExportSource) -> None:
    """Raises ExportError for a family that ``consumer`` is not known to load quantized."""
    family = source.shape.model_type
    known = _LOADED_BY.get(family)
    if known is not None and consumer not in known and consumer != "tensorrt-llm-1.2":  # which has a list of its own
        raise ExportError(
            f"{LABELS[consumer]} is not known to load quantized {family} models; exports of them are for "
            f"{', '.join(LABELS[name] for name in known)}"
        )
