"""What each run-time loads of each layout: what it would refuse, or load without its quantization, is refused here.

From the loaders' own sources: vllm/model_executor/layers/quantization, sglang/srt/layers/quantization,
tensorrt_llm/quantization and tensorrt_llm/_torch/modules/linear.py.
"""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.compressed_tensors_schemes import layout_of
from quantize.export.modelopt_schemes import algorithm
from quantize.export.options import LABELS, Consumer, Format
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.trtllm_checks import check_unified
from quantize.parallel import INT4_GROUPS

_MARLIN_GROUPS = (32, 64, 128)  # of the kernels that vLLM and SGLang choose for weight-only INT4
_MODELOPT: dict[Consumer, tuple[str, ...]] = {  # quant_algo
    "tensorrt-llm": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "W4A16_AWQ", "W4A8_AWQ", "NVFP4"),
    "vllm": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "NVFP4"),
}
_MODELOPT_MIXED: dict[Consumer, tuple[str, ...]] = {
    "tensorrt-llm": ("FP8", "W4A16_AWQ", "W4A8_AWQ", "NVFP4"),
    "vllm": ("FP8", "NVFP4"),
}


def check_consumer(layout: Format, consumer: Consumer, source: ExportSource) -> None:
    """Raises ExportError when ``consumer`` does not load the checkpoint in this layout."""
    if layout == "trtllm":
        check_unified(source)
        return
    if not source.quantized_schemes:
        raise ExportError(
            f"no linear of this checkpoint is quantized, so there is nothing to export as {layout!r}; "
            f"{LABELS[consumer]} loads the original model, or quantize it first"
        )
    is_mixed = len(source.quantized_schemes) > 1
    for scheme in source.quantized_schemes:
        problem = _problem(layout, consumer, scheme, is_mixed)
        if problem:
            raise ExportError(f"{LABELS[consumer]} does not load {scheme} in the format {layout!r}: {problem}")
    if source.kv_cache not in (None, "fp8") and consumer != "modelopt":
        raise ExportError(
            f"{LABELS[consumer]} loads scales of an fp8 KV cache, found {source.kv_cache}; take kv_cache fp8"
        )


def _problem(layout: Format, consumer: Consumer, scheme: LinearScheme, is_mixed: bool) -> str | None:
    if layout == "modelopt":
        return _modelopt_problem(consumer, scheme, is_mixed)
    if scheme.has_pre_quant_scale:
        return "the layout has no factors of the inputs; take fold_smoothing true"
    if layout_of(scheme) is None:
        return "the layout has no such scheme; take the format modelopt, or another recipe"
    if consumer == "tensorrt-llm":
        known = "of this layout it takes fp8 by channel or block, nvfp4 with its inputs, and mxfp4"
        return None if _tensorrt_llm_reads(scheme) else f"{known}; take the format modelopt"
    if consumer == "sglang" and scheme.name in ("nvfp4", "mxfp4"):
        return "it is not known to read four-bit floats of this layout; take fp8 or int4-rtn-sym"
    if scheme.name != "int4":
        return None
    if scheme.group_size not in _MARLIN_GROUPS:
        return f"its kernels have groups of {', '.join(map(str, _MARLIN_GROUPS))}; change group_size in the recipe"
    if not scheme.symmetric and consumer == "sglang":
        return "releases differ in whether they read zero points; take the recipe int4-rtn-sym"
    return None


def _tensorrt_llm_reads(scheme: LinearScheme) -> bool:
    """Of compressed-tensors: per-tensor fp8 and integers are refused or fall through."""
    is_dynamic = scheme.activations is None or scheme.activations.scale == "token"
    if scheme.name == "fp8":
        return scheme.granularity != "tensor" and is_dynamic
    return scheme.name == "mxfp4" or (scheme.name == "nvfp4" and scheme.activations is not None)


def _modelopt_problem(consumer: Consumer, scheme: LinearScheme, is_mixed: bool) -> str | None:
    if not scheme.symmetric:
        return "the layout has no zero points; take the recipe int4-rtn-sym"
    name = algorithm(scheme)
    if name is None:
        return "the layout has no name for it; see the table of docs/export.md"
    if consumer == "modelopt":
        return None
    known = (_MODELOPT_MIXED if is_mixed else _MODELOPT)[consumer]
    if name not in known:
        mixed = " beside other schemes" if is_mixed else ""
        advice = "; take the format compressed-tensors" if layout_of(scheme) is not None else ""
        return f"of this layout it takes {', '.join(known)}{mixed}, found {name}{advice}"
    if scheme.name == "int4" and scheme.group_size not in INT4_GROUPS:
        return "its kernels have groups of 64 and 128; change group_size in the recipe"
    if name == "W4A8_AWQ" and scheme.group_size != 128:
        return "its W4A8 kernels have groups of 128; change group_size in the recipe"
    return None
