"""From the options of ``plansmith plan`` and the build file to a request. Defaults are in this one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from builder.options import BuildOptions
from builder.planner.decoder_shape import DecoderShape
from builder.planner.footprint import StepLimits
from builder.planner.from_config import read_decoder_shape
from builder.planner.gpu import find_gpu
from builder.planner.layout import Workload
from builder.planner.plan import Request
from builder.planner.precision import KvFormat, Precision, resolve_recipe, sized_recipe
from builder.planner.stored import read_stored
from plansmith.capacity.source import Source
from plansmith_errors import BuildError, ConfigError
from quantize.recipe_files import load_recipe

_NODE = 8  # GPUs, when the number is not given
_DEFAULT_MAX_SEQ_LEN = 4096

Floats = Literal["float16", "bfloat16"]


@dataclass(frozen=True)
class PlanOptions:
    """Of the command line; None: as the build file or the checkpoint says."""

    gpu: str
    num_gpus: int | None = None
    weights: str | None = None
    kv_cache: str | None = None
    context: int | None = None
    batch_size: int = 1
    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None


def make_request(source: Source, options: PlanOptions) -> Request:
    """Raises ConfigError and BuildError."""
    gpu = find_gpu(options.gpu)
    shape = read_decoder_shape(source.config, source.where)
    build = source.build_file.build
    limits = _limits(shape, build, options.context, options.batch_size)
    sizes = {name: getattr(options, name) or _fixed(build, name) for name in ("tp_size", "pp_size", "ep_size")}
    return Request(
        shape=shape,
        precision=_precision(source, options, build),
        gpu=gpu,
        num_gpus=options.num_gpus or _num_gpus(sizes),
        limits=limits,
        workload=Workload(options.context or limits.max_seq_len, options.batch_size),
        **sizes,
    )


def _fixed(build: BuildOptions, name: str) -> int | None:
    """What a build file says of parallelism; its default is no choice."""
    return getattr(build, name) if name in build.model_fields_set else None


def _num_gpus(sizes: dict[str, int | None]) -> int:
    if sizes["tp_size"] is not None and sizes["pp_size"] is not None:
        return sizes["tp_size"] * sizes["pp_size"]
    return _NODE


def _limits(shape: DecoderShape, build: BuildOptions, context: int | None, batch_size: int) -> StepLimits:
    longest = build.max_seq_len
    if longest is not None and longest > shape.max_positions:
        raise BuildError(
            f"max_seq_len is {longest}, but the model has {shape.max_positions} positions; lower max_seq_len"
        )
    if longest is None:
        longest = max(min(shape.max_positions, _DEFAULT_MAX_SEQ_LEN), context or 0)
    if context is not None and context > shape.max_positions:
        raise ConfigError(f"--context is {context}, but the model has {shape.max_positions} positions; plan for less")
    if context is not None and context > longest:
        raise ConfigError(f"--context is {context}, but build.max_seq_len is {longest}; raise it, or plan for less")
    return StepLimits(
        max_batch_size=_max_batch_size(build, batch_size),
        max_num_tokens=build.max_num_tokens,
        max_seq_len=longest,
        tokens_per_block=build.resolved_tokens_per_block,
    )


def _max_batch_size(build: BuildOptions, batch_size: int) -> int:
    """An engine that takes as many sequences as are asked for, unless the build says otherwise."""
    if batch_size <= build.max_batch_size:
        return build.max_batch_size
    if "max_batch_size" in build.model_fields_set:
        raise ConfigError(
            f"--batch is {batch_size}, but build.max_batch_size is {build.max_batch_size}; raise it, or plan for fewer"
        )
    return batch_size


def _precision(source: Source, options: PlanOptions, build: BuildOptions) -> Precision:
    floats = build.dtype or _floats(source.config)
    precision = _weights(source, options.weights, floats)
    return replace(precision, kv_cache=_kv_cache(options.kv_cache, build, precision))


def _weights(source: Source, weights: str | None, floats: Floats) -> Precision:
    """By the command line, the build file's recipe, the checkpoint's own quantization, or its floats, in this order."""
    plain = _float_word(floats)
    if weights is not None:
        recipe, given = resolve_recipe(weights)
        return Precision(weights, recipe, recipe.kv_cache or plain, given or floats)
    if source.is_build_file:
        recipe = sized_recipe(source.build_file.quantize.recipe)
        return Precision(recipe.name, recipe, recipe.kv_cache or plain, floats)
    stored = read_stored(source.config, source.where)
    if stored is None:
        return Precision(plain, load_recipe("none"), plain, floats)
    label, recipe, rules, kv_cache = stored
    known = cast("KvFormat", kv_cache) if kv_cache in get_args(KvFormat) else plain
    return Precision(label, recipe, known, floats, rules)


def _kv_cache(given: str | None, build: BuildOptions, precision: Precision) -> KvFormat:
    wanted = given or build.kv_cache_dtype
    if wanted == "auto":
        return _float_word(precision.floats)
    return cast("KvFormat", wanted) if wanted is not None else precision.kv_cache


def _floats(config: dict[str, Any]) -> Floats:
    """float16 where the config says so; everything else is planned in bfloat16, which has the same size."""
    return "float16" if config.get("dtype", config.get("torch_dtype")) == "float16" else "bfloat16"


def _float_word(floats: Floats) -> KvFormat:
    return "fp16" if floats == "float16" else "bf16"
