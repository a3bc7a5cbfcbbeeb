"""Lint of a TensorRT-LLM unified checkpoint: config.json and rankN.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plansmith_errors import CheckpointError
from quantize.export.scheme import NOT_QUANTIZED
from quantize.export.trtllm_layout import RankLayout
from quantize.lint.finding import Expected, Finding, compare
from quantize.lint.unified_config import UnifiedConfig, config_findings
from quantize.parallel import legal_advice, problems_of
from quantize.safetensors_file import SafetensorsFile

_FLOATS = ("bfloat16", "float16", "float32")
_E4M3 = ("float8_e4m3fn", "int8")  # some writers store its bytes as int8; the loader takes both
MAX_RANKS = 1024  # beyond it a config is damaged


def lint_unified(path: Path, config: dict[str, Any], unified: UnifiedConfig) -> list[Finding]:
    """Headers only. A cut that cannot work is the one finding: no shapes follow from it."""
    findings = config_findings(config, unified)
    group = unified.group_size if unified.algorithm == "W4A16_AWQ" else None
    problems = problems_of(unified.shape, unified.mapping, group)
    if problems or unified.mapping.world_size > MAX_RANKS:
        advice = legal_advice(unified.shape, group)
        message = problems[0] if problems else f"{unified.mapping.world_size} ranks are more than {MAX_RANKS}"
        return [*findings, Finding("shard", "mapping", f"{message}; {advice}")]
    for rank in range(unified.mapping.world_size):
        file, problem = open_rank(path, rank)
        if file is None:
            findings.append(Finding("file", f"rank{rank}.safetensors", problem))
        else:
            findings += compare(expected_of_rank(unified, rank), file.tensors, f"rank{rank}: ")
    return findings


def open_rank(path: Path, rank: int) -> tuple[SafetensorsFile | None, str]:
    """The rank's file, or why it cannot be read."""
    file = path / f"rank{rank}.safetensors"
    if not file.is_file():
        return None, "is missing; config.json's mapping has this rank"
    try:
        return SafetensorsFile(file), ""
    except CheckpointError as error:
        return None, str(error).removeprefix(f"{file}: ")


def expected_of_rank(unified: UnifiedConfig, rank: int) -> dict[str, Expected]:
    """Every tensor of a rank, by name."""
    layout = RankLayout(unified.shape, NOT_QUANTIZED, unified.mapping, unified.dtype)
    expected: dict[str, Expected] = {}
    for tensor in layout.tensors(rank):
        name, size = tensor.spec.name, tensor.spec.shape
        is_linear = tensor.part in ("weight", "head")
        if is_linear and unified.algorithm is not None and not unified.is_excluded(name.removesuffix(".weight")):
            expected |= {name.removesuffix("weight") + part: found for part, found in _parts(unified, *size)}
        else:
            # A tied head may be shared with the embeddings of the same rank.
            shared = tensor.part == "head" and unified.shape.is_tied and unified.mapping.pp_size == 1
            expected[name] = Expected((unified.dtype.name,), size, is_required=not shared)
        if name.endswith("attention.qkv.weight") and unified.kv_cache_algorithm is not None:
            scale = name.replace("qkv.weight", "kv_cache_scaling_factor")
            expected[scale] = Expected(("float32",), (1,), is_scale=True)
    return expected


def _parts(unified: UnifiedConfig, rows: int, columns: int) -> Iterator[tuple[str, Expected]]:
    """How a quantized linear of ``rows`` x ``columns`` is stored: name parts, types and shapes."""
    one = Expected(("float32",), (1,), is_scale=True)
    if unified.algorithm == "W4A16_AWQ":
        yield from _awq_parts(unified, rows, columns)
    elif unified.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        yield "weight", Expected(_E4M3, (rows, columns))
        yield "per_channel_scale", Expected(("float32",), (rows,), is_scale=True)
    elif unified.algorithm == "FP8":
        yield "weight", Expected(_E4M3, (rows, columns))
        yield "weights_scaling_factor", one
        yield "activation_scaling_factor", one
    elif unified.algorithm == "W8A8_SQ_PER_CHANNEL":
        yield "weight", Expected(("int8",), (rows, columns))
        yield "weights_scaling_factor", Expected(("float32",), (rows,), is_scale=True)
        yield "activation_scaling_factor", one
        yield "prequant_scaling_factor", Expected(_FLOATS, (columns,), is_scale=True)
    else:  # W8A16 and W4A16 are quantized when the engine is built
        yield "weight", Expected((unified.dtype.name,), (rows, columns))


def _awq_parts(unified: UnifiedConfig, rows: int, columns: int) -> Iterator[tuple[str, Expected]]:
    groups = (rows, columns // unified.group_size)
    yield "weight", Expected(("int8",), (rows // 2, columns))
    yield "weights_scaling_factor", Expected(_FLOATS, groups, is_scale=True)
    if unified.has_prequant_scale:
        yield "prequant_scaling_factor", Expected(_FLOATS, (columns,), is_scale=True)
    if unified.has_zero_point:
        yield "zero", Expected(_FLOATS, groups)
