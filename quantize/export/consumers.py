"""What each run-time loads of each layout: what it would refuse, or load without its quantization, is refused here.

From the loaders' own sources: vllm/model_executor/layers/quantization, sglang/srt/layers/quantization,
tensorrt_llm/quantization and tensorrt_llm/_torch/modules/linear.py.
"""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.options import LABELS, Consumer, Format
from quantize.export.scheme import NOT_QUANTIZED, LinearScheme
from quantize.model_shape import ModelShape
from quantize.parallel import INT4_GROUPS

_MARLIN_GROUPS = (32, 64, 128)  # of the kernels that vLLM and SGLang choose for weight-only INT4
_TRTLLM_FAMILIES = ("llama", "mistral", "qwen2")


def check_consumer(layout: Format, consumer: Consumer, scheme: LinearScheme, shape: ModelShape) -> None:
    """Raises ExportError when ``consumer`` does not load ``scheme`` in this layout."""
    if layout == "trtllm":
        _check_unified(scheme, shape)
        return
    if scheme == NOT_QUANTIZED:
        raise ExportError(
            f"no linear of this checkpoint is quantized, so there is nothing to export as {layout!r}; "
            f"{LABELS[consumer]} loads the original model, or quantize it first"
        )
    problem = _problem(layout, consumer, scheme)
    if problem:
        raise ExportError(f"{LABELS[consumer]} does not load {scheme} in the format {layout!r}: {problem}")


def _check_unified(scheme: LinearScheme, shape: ModelShape) -> None:
    label = LABELS["tensorrt-llm-1.2"]
    if shape.model_type not in _TRTLLM_FAMILIES:
        raise ExportError(
            f"{shape.model_type} models cannot be exported for {label}; supported: {', '.join(_TRTLLM_FAMILIES)}"
        )
    if scheme.name == "int8":
        raise ExportError(
            f"{label} takes pre-quantized int8 weights only in a layout made for one GPU generation; "
            "take the recipe fp8 or int4-rtn-sym"
        )
    if scheme.name == "int4" and not scheme.symmetric:
        raise ExportError(f"{label} takes INT4 (W4A16_AWQ) without zero points; take the recipe int4-rtn-sym")
    if scheme.name == "int4" and scheme.group_size not in INT4_GROUPS:
        raise ExportError(f"{label} takes INT4 in groups of 64 or 128, found {scheme.group_size}; change group_size")
    if scheme.name == "fp8" and shape.qkv_bias:
        raise ExportError(
            f"{label}: FP8 per channel is known to load for models without attention biases only; "
            "take the recipe none or int4-rtn-sym"
        )


def _problem(layout: Format, consumer: Consumer, scheme: LinearScheme) -> str | None:
    if layout == "modelopt":
        return _modelopt_problem(consumer, scheme)
    if consumer == "tensorrt-llm":
        return None if scheme.name == "fp8" else "it takes fp8 alone; for int4 take the format modelopt"
    if scheme.name != "int4":
        return None
    if scheme.group_size not in _MARLIN_GROUPS:
        return f"its kernels have groups of {', '.join(map(str, _MARLIN_GROUPS))}; change group_size in the recipe"
    if not scheme.symmetric and consumer == "sglang":
        return "releases differ in whether they read zero points; take the recipe int4-rtn-sym"
    return None


def _modelopt_problem(consumer: Consumer, scheme: LinearScheme) -> str | None:
    if scheme.name == "int8":
        return "the layout has no int8 weights without activation scales; take the format compressed-tensors"
    if scheme.name == "fp8":
        return None
    if consumer == "vllm":
        return "it takes fp8 alone; for int4 take the format compressed-tensors"
    if not scheme.symmetric:
        return "the layout has no zero points; take the recipe int4-rtn-sym"
    if scheme.group_size not in INT4_GROUPS:
        return "its kernels have groups of 64 and 128; change group_size in the recipe"
    return None
