"""Lint of a TensorRT-LLM unified checkpoint: config.json and rankN.safetensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from plansmith_errors import CheckpointError
from quantize.dtypes import FLOAT8_E4M3
from quantize.export.trtllm_layout import Module, RankLayout, RankTensor
from quantize.export.trtllm_schemes import AWQ, linear_parts
from quantize.lint.finding import Expected, Finding, compare
from quantize.lint.unified_config import UnifiedConfig, config_findings
from quantize.model_shape import EMBEDDINGS
from quantize.parallel import legal_advice, problems_of
from quantize.safetensors_file import SafetensorsFile
from quantize.safetensors_writer import TensorSpec

_FLOATS = ("bfloat16", "float16", "float32")
_E4M3 = ("float8_e4m3fn", "int8")  # some writers store its bytes as int8; the loader takes both
_AWQ_SCALES = "weights_scaling_factor"
MAX_RANKS = 1024  # beyond it a config is damaged


def lint_unified(path: Path, config: dict[str, Any], unified: UnifiedConfig) -> list[Finding]:
    """Headers only. A cut that cannot work is the one finding: no shapes follow from it."""
    findings = config_findings(config, unified)
    group = max((own.group_size for own in unified.schemes if own.algorithm in AWQ), default=None)
    has_nvfp4 = any(own.algorithm == "NVFP4" for own in unified.schemes)
    problems = problems_of(unified.shape, unified.mapping, group, has_nvfp4=has_nvfp4)
    if problems or unified.mapping.world_size > MAX_RANKS:
        advice = legal_advice(unified.shape, group, has_nvfp4=has_nvfp4)
        message = problems[0] if problems else f"{unified.mapping.world_size} ranks are more than {MAX_RANKS}"
        return [*findings, Finding("shard", "mapping", f"{message}; {advice}")]
    for rank in range(unified.mapping.world_size):
        file, problem = open_rank(path, rank)
        if file is None:
            findings.append(Finding("file", f"rank{rank}.safetensors", problem))
        else:
            findings += compare(expected_of_rank(unified, rank, file.tensors), file.tensors, f"rank{rank}: ")
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


def expected_of_rank(unified: UnifiedConfig, rank: int, stored: Collection[str] = ()) -> dict[str, Expected]:
    """Every tensor of a rank, by name. ``stored``: names, where it depends on them which of two forms is meant."""
    has_kv_scales = unified.kv_cache_algorithm is not None
    layout = RankLayout(unified.shape, unified.mapping, unified.dtype, unified.scheme_of, has_kv_scales)
    expected: dict[str, Expected] = {}
    for tensor in layout.tensors(rank):
        name = tensor.spec.name
        if tensor.part == "head":
            expected |= _head(unified, tensor)
        elif tensor.sources == (EMBEDDINGS,):
            expected[name] = Expected((unified.dtype.name,), unified.embedding_shape)
        elif tensor.part == "kv":
            expected |= _kv_scales(name, stored)
        else:
            expected[name] = _expected(tensor)
    return expected


def _expected(tensor: RankTensor) -> Expected:
    """What the exporter writes, with the types that others use as well."""
    dtype, shape = tensor.spec.dtype, tensor.spec.shape
    algorithm = None if tensor.module is None else tensor.module.own.algorithm
    if tensor.part == "weight" and dtype == FLOAT8_E4M3:
        return Expected(_E4M3, shape)
    if tensor.part in ("prequant_scaling_factor", "zero", "one") or (algorithm in AWQ and tensor.part == _AWQ_SCALES):
        return Expected(_FLOATS, shape, is_scale=tensor.is_scale)
    return Expected((dtype.name,), shape, is_scale=tensor.is_scale, or_scalar=tensor.is_scale and shape == (1,))


def _head(unified: UnifiedConfig, tensor: RankTensor) -> dict[str, Expected]:
    """Others quantize it too, where ``exclude_modules`` does not name it."""
    rows, columns = tensor.spec.shape
    own = unified.scheme_of("lm_head")
    if own.algorithm is None:
        # A tied head may be shared with the embeddings of the same rank.
        shared = unified.shape.is_tied and unified.mapping.pp_size == 1
        return {tensor.spec.name: Expected((unified.dtype.name,), (rows, columns), is_required=not shared)}
    module = Module("lm_head", own, (), (), ())
    found = {}
    for part in linear_parts(own, rows, columns, unified.dtype):
        spec = TensorSpec(f"lm_head.{part.suffix}", part.dtype, part.shape)
        found[spec.name] = _expected(RankTensor(spec, part.suffix, module=module, is_scale=part.is_scale))
    return found


def _kv_scales(name: str, stored: Collection[str]) -> dict[str, Expected]:
    """One for keys and values; where others store two, the loader takes the larger."""
    both = [name.replace("kv_cache", f"{kind}_cache") for kind in "kv"]
    has_both = all(other in stored for other in both)
    one = Expected(("float32",), (1,), is_required=not has_both, is_scale=True)
    return {name: one, **{other: replace(one, is_required=False) for other in both}}
