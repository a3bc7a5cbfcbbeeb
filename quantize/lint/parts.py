"""How each Hugging Face-named layout stores one linear weight [out, in]: suffixes of "X.weight", types and shapes."""

from __future__ import annotations

from collections.abc import Callable

from quantize.dtypes import SOURCE_FLOATS
from quantize.export.scheme import LinearScheme
from quantize.lint.finding import Expected

Parts = Callable[[LinearScheme, int, int], dict[str, Expected]]
NEUTRAL = ("int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "none")
GROUPED = ("int4", "nvfp4", "mxfp4", "mxfp8")
_FP8_BLOCK = 128
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
    """pack-quantized (int4, int8) and float-quantized of https://github.com/vllm-project/compressed-tensors"""
    if scheme.name == "fp8":
        scale = Expected(_FLOATS_16_32, (rows, 1), is_scale=True)
        return {"": Expected(("float8_e4m3fn",), (rows, columns)), "_scale": scale}
    per_word = 8 if scheme.name == "int4" else 4
    groups = columns // _group(scheme) if scheme.name == "int4" else 1
    parts = {
        "_packed": Expected(("int32",), (rows, -(-columns // per_word))),
        "_scale": Expected(_FLOATS_16_32, (rows, groups), is_scale=True),
        "_shape": Expected(("int64", "int32"), (2,)),
    }
    if scheme.symmetric:
        return parts
    return parts | {"_zero_point": Expected(("int32",), (-(-rows // per_word), groups))}


def modelopt_parts(scheme: LinearScheme, rows: int, columns: int) -> dict[str, Expected]:
    """W4A16_AWQ and FP8_PER_CHANNEL_PER_TOKEN of https://github.com/NVIDIA/Model-Optimizer"""
    if scheme.name == "fp8":
        scale = Expected(("float32",), (rows,), is_scale=True)
        return {"": Expected(("float8_e4m3fn",), (rows, columns)), "_scale": scale}
    groups = (rows, columns // _group(scheme))
    scale = Expected(_FLOATS_16_32, groups, is_scale=True)
    return {"": Expected(("uint8",), (rows // 2, columns)), "_scale": scale}


def _group(scheme: LinearScheme) -> int:
    return scheme.group_size or 1
