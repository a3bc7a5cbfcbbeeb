"""How each Hugging Face-named layout stores one linear weight [out, in]: suffixes of "X.weight", types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quantize.dtypes import FLOAT8_E4M3, SOURCE_FLOATS
from quantize.export import compressed_tensors_schemes, modelopt_schemes
from quantize.export.scheme import LinearScheme
from quantize.lint.finding import Expected
from quantize.model_shape import Linear
from quantize.safetensors_writer import TensorSpec

Parts = Callable[[LinearScheme, int, int], dict[str, Expected]]
NEUTRAL = ("int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "none")
GROUPED = ("int4", "nvfp4", "mxfp4", "mxfp8")
_FP8_BLOCK = 128
_X = "x.weight"
_FLOAT32 = np.dtype(np.float32)
_FLOATS_16_32 = ("bfloat16", "float16", "float32")


def plain(rows: int, columns: int) -> dict[str, Expected]:
    """A weight that is not quantized."""
    return {"": Expected(SOURCE_FLOATS, (rows, columns))}


def neutral_parts(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    """docs/quantized-checkpoint.md"""
    if scheme.name == "int4":
        return _neutral_int4(scheme, rows, columns)
    if scheme.name in ("nvfp4", "mxfp4", "mxfp8"):
        return _neutral_blocks(scheme, rows, columns)
    dtype = "int8" if scheme.name == "int8" else "float8_e4m3fn"
    scales = {"tensor": (), "block": (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))}.get(
        scheme.granularity, (rows, 1)
    )
    return {"": Expected((dtype,), (rows, columns)), "_scale": Expected(("float32",), scales, is_scale=True)}


def _neutral_int4(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    groups = (rows, columns // _group(scheme))
    parts = {
        "": Expected(("uint8",), (rows, columns // 2)),
        "_scale": Expected(("float16", "float32"), groups, is_scale=True),
    }
    return parts if scheme.symmetric else parts | {"_zero_point": Expected(("uint8",), groups)}


def _neutral_blocks(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    blocks = (rows, columns // _group(scheme))
    if scheme.name == "mxfp8":
        return {"": Expected(("float8_e4m3fn",), (rows, columns)), "_scale": Expected(("uint8",), blocks)}
    values = Expected(("uint8",), (rows, columns // 2))
    if scheme.name == "mxfp4":
        return {"": values, "_scale": Expected(("uint8",), blocks)}
    block_scales = Expected(("float8_e4m3fn",), blocks, is_scale=True)
    return {"": values, "_scale": block_scales, "_scale_2": Expected(("float32",), (), is_scale=True)}


def compressed_tensors_parts(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    """https://github.com/vllm-project/compressed-tensors"""
    return _parts(compressed_tensors_schemes.weight_specs(_X, _linear(rows, columns), scheme, _FLOAT32))


def modelopt_parts(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    """https://github.com/NVIDIA/Model-Optimizer"""
    return _parts(modelopt_schemes.weight_specs(_X, _linear(rows, columns), scheme))


def _parts(specs: Sequence[TensorSpec]) -> dict[str, Expected]:
    """What the exporters write, with the types that others use as well."""
    return {_suffix(spec.name): _expected(spec) for spec in specs}


def _suffix(name: str) -> str:
    """After "X.weight", or after "X" of what belongs to the inputs: then it begins with a dot."""
    return name.removeprefix(_X) if name.startswith(_X) else name.removeprefix(_X.removesuffix(".weight"))


def _expected(spec: TensorSpec) -> Expected:
    if spec.name.endswith("_shape"):
        return Expected(("int64", "int32"), spec.shape)
    is_scale = "scale" in spec.name and spec.dtype != np.uint8
    if not is_scale or spec.dtype == FLOAT8_E4M3:
        return Expected((spec.dtype.name,), spec.shape, is_scale=is_scale)
    return Expected(_FLOATS_16_32, spec.shape, is_scale=True)


def _linear(rows: int, columns: int) -> Linear:
    return Linear("x", rows, columns, False)


def _group(scheme: LinearScheme) -> int:
    return scheme.group_size or 1
