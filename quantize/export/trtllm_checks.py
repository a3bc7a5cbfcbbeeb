"""What trtllm-build of TensorRT-LLM 1.2 makes an engine of; what it would refuse or misread is refused here.

tensorrt_llm/quantization/{quantize,layers}.py, layers/moe.py and models/{llama,qwen}/model.py (1.2).
"""

from __future__ import annotations

from plansmith_errors import ExportError
from quantize.export.options import LABELS
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.trtllm_config import ARCHITECTURES
from quantize.export.trtllm_schemes import FP8_ROWWISE, SQ_TOKEN_PLUGIN, module_scheme
from quantize.mixture import Mixture
from quantize.model_shape import ModelShape
from quantize.parallel import INT4_GROUPS

_W4A8_GROUP = 128
_OF_EXPERTS = ("FP8", "W4A16_AWQ")


def check_unified(source: ExportSource) -> None:
    """Raises ExportError for a model or a scheme that no engine is built of."""
    label, shape = LABELS["tensorrt-llm-1.2"], source.shape
    _check_family(shape, label)
    for scheme in source.quantized_schemes:
        problem = _missing(scheme) or _unfit(scheme, shape)
        if problem:
            raise ExportError(f"{label} does not load {scheme}: {problem}")


def _check_family(shape: ModelShape, label: str) -> None:
    if shape.model_type not in ARCHITECTURES:
        raise ExportError(
            f"{shape.model_type} models cannot be exported for {label}; supported: {', '.join(ARCHITECTURES)}"
        )
    if shape.model_type.startswith("qwen") and shape.o_bias:
        raise ExportError(
            f"{label} builds {shape.model_type} models without a bias of the attention's output; this one has it "
            "(attention_bias)"
        )
    if shape.mixture is not None and not all(shape.mixture.sparse_layers):
        layer = shape.mixture.sparse_layers.index(False)
        raise ExportError(
            f"{label} builds {shape.model_type} models with experts in every layer; layer {layer} has none"
        )


def _missing(scheme: LinearScheme) -> str | None:
    """Why the format has no such scheme; None when it has."""
    if module_scheme(scheme) is not None:
        return None
    if scheme.name == "int4":
        return "it takes INT4 (W4A16_AWQ, W4A8_AWQ) without zero points; take the recipe int4-rtn-sym"
    if scheme.name == "int8":
        return (
            "it takes pre-quantized int8 weights only in a layout made for one GPU generation; "
            "take the recipe fp8 or int4-rtn-sym, or int8-sq, which quantizes the inputs as well"
        )
    if scheme.name == "nvfp4":
        return "its NVFP4 kernels quantize the inputs as well; take the recipe nvfp4-w4a4"
    if scheme.name == "fp8" and scheme.granularity == "tensor":
        return "with one scale per tensor its inputs have static scales; take the recipe fp8-static, or fp8"
    return "its engines have no kernels for it; take the recipe fp8, or the format modelopt for TensorRT-LLM 1.3"


def _unfit(scheme: LinearScheme, shape: ModelShape) -> str | None:
    """Why the model, or its inputs, do not fit the kernels of the scheme; None when they do."""
    own = module_scheme(scheme)
    algorithm = None if own is None else own.algorithm
    if algorithm == "W4A8_AWQ" and scheme.group_size != _W4A8_GROUP:
        return f"its W4A8 kernels take groups of {_W4A8_GROUP}, found {scheme.group_size}; change group_size"
    if scheme.name == "int4" and scheme.group_size not in INT4_GROUPS:
        return f"it takes INT4 in groups of 64 or 128, found {scheme.group_size}; change group_size"
    if scheme.has_pre_quant_scale and own is not None and not own.has_prequant:
        return f"{algorithm} has no factors of the inputs; take fold_smoothing true"
    if algorithm == FP8_ROWWISE and shape.qkv_bias:
        return (
            "FP8 per channel is known to load for models without attention biases only; "
            "take the recipe none, fp8-static or int4-rtn-sym"
        )
    if algorithm in (FP8_ROWWISE, SQ_TOKEN_PLUGIN) and shape.qk_norm:
        return f"its attention for {algorithm} does not normalize queries and keys; take the recipe fp8-static"
    return _unfit_for_experts(scheme, algorithm, shape.mixture)


def _unfit_for_experts(scheme: LinearScheme, algorithm: str | None, mixture: Mixture | None) -> str | None:
    if mixture is None:
        return None
    if algorithm not in _OF_EXPERTS:
        return (
            f"of models with experts it takes {' and '.join(_OF_EXPERTS)}; take the recipe fp8-static or int4-rtn-sym"
        )
    if scheme.has_pre_quant_scale:
        return "experts share the factors of their inputs there; take fold_smoothing true"
    return None
