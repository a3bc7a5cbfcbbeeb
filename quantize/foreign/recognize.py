"""Which tool quantized a checkpoint, from config.json or from the file that older tools wrote beside it."""

from __future__ import annotations

from typing import Any

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint
from quantize.foreign.awq import AwqLayout
from quantize.foreign.checkpoint import ForeignCheckpoint
from quantize.foreign.compressed_tensors import CompressedTensorsLayout
from quantize.foreign.fp8 import Fp8Layout
from quantize.foreign.gptq import GptqLayout
from quantize.foreign.layout import Layout, shorten
from quantize.foreign.modelopt import ModelOptLayout
from quantize.foreign.split import split_packed
from quantize.quantized_tensor import QUANT_METHOD
from quantize.safetensors_checkpoint import read_json

MODELOPT_CONFIG = "hf_quant_config.json"
GPTQ_CONFIG = "quantize_config.json"
_LAYOUTS: dict[str, type[Layout]] = {
    "compressed-tensors": CompressedTensorsLayout,
    "modelopt": ModelOptLayout,
    "modelopt_fp4": ModelOptLayout,
    "modelopt_mixed": ModelOptLayout,
    "gptq": GptqLayout,
    "awq": AwqLayout,
    "fp8": Fp8Layout,
}


def dequantized(source: Checkpoint) -> Checkpoint:
    """``source`` seen as a plain model; itself when no other tool quantized it. Raises CheckpointError."""
    layout = _layout_of(source)
    return source if layout is None else split_packed(ForeignCheckpoint(source, layout))


def is_foreign(source: Checkpoint) -> bool:
    """Whether another tool quantized it, one that can be read or not."""
    config = source.config.get("quantization_config")
    if config is None:
        return source.path.is_dir() and any((source.path / name).is_file() for name in (MODELOPT_CONFIG, GPTQ_CONFIG))
    return not isinstance(config, dict) or config.get("quant_method") != QUANT_METHOD


def _layout_of(source: Checkpoint) -> Layout | None:
    config = source.config.get("quantization_config")
    if config is None:
        config, method = _beside(source)
        if method is None:
            return None
    elif not isinstance(config, dict):
        raise CheckpointError(f"{source.path}: quantization_config is {shorten(config)}, expected a mapping")
    else:
        method = config.get("quant_method", "modelopt" if "quant_algo" in config else None)
    if method == QUANT_METHOD:
        return None
    layout = _LAYOUTS.get(method) if isinstance(method, str) else None
    if layout is None:
        raise CheckpointError(
            f"{source.path}: is quantized by {shorten(method)}, which cannot be read; readable are "
            f"{', '.join(_LAYOUTS)}; quantize the original model"
        )
    if layout is ModelOptLayout and (source.path / MODELOPT_CONFIG).is_file():
        config = read_json(source.path / MODELOPT_CONFIG)  # says more than its copy in config.json
    return layout(str(source.path), config)


def _beside(source: Checkpoint) -> tuple[dict[str, Any], str | None]:
    """The configuration that lies beside config.json, and the method that it belongs to."""
    if not source.path.is_dir():
        return {}, None
    for name, method in ((MODELOPT_CONFIG, "modelopt"), (GPTQ_CONFIG, "gptq")):
        if (source.path / name).is_file():
            return read_json(source.path / name), method
    return {}, None
