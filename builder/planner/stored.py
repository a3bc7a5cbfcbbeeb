"""The rules of a checkpoint that is quantized already, read from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from plansmith_errors import ConfigError
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe
from quantize.recipe_files import load_recipe
from quantize.weight_rule import WeightRule


def read_stored(config: Mapping[str, Any], source: str) -> tuple[str, Recipe, dict[str, WeightRule], str | None] | None:
    """Label, recipe, rules by name and scheme of the KV cache; None where nothing is quantized.

    Of other tools' checkpoints, FP8 in blocks of 128 x 128 (DeepSeek-V3) is understood; the rest is refused with a
    ConfigError, for their config.json does not say what each matrix takes.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{source}: quantization_config is {found!r}, expected a mapping")
    method = found.get("quant_method")
    if method == QUANT_METHOD:
        return _own(found, source)
    if method == "fp8" and found.get("weight_block_size") == [128, 128]:
        return "fp8-block, as published", load_recipe("fp8-block"), {}, None
    raise ConfigError(
        f"{source}: is quantized by {method!r}, whose sizes config.json does not say; give the precision to plan with "
        "by --weights, such as --weights int4"
    )


def _own(found: Mapping[str, Any], source: str) -> tuple[str, Recipe, dict[str, WeightRule], str | None]:
    tensors, recipe, kv_cache = found.get("tensors"), found.get("recipe"), found.get("kv_cache")
    if found.get("format_version") != FORMAT_VERSION or not isinstance(tensors, Mapping):
        raise ConfigError(f"{source}: quantization_config is of another format; quantize the model again")
    try:
        rules = {str(name): _rule(entry) for name, entry in tensors.items()}
    except (ValidationError, TypeError, AttributeError, KeyError):
        raise ConfigError(
            f"{source}: quantization_config does not describe tensors as expected; quantize it again"
        ) from None
    label = recipe.get("name") if isinstance(recipe, Mapping) else None
    scheme = kv_cache.get("scheme") if isinstance(kv_cache, Mapping) else None
    return f"{label or 'quantized'}, as stored", load_recipe("none"), rules, scheme


def _rule(entry: Mapping[str, Any]) -> WeightRule:
    scheme, activations = entry["scheme"], entry.get("activations") or {}
    size = entry.get("group_size")
    return WeightRule(
        scheme=scheme,
        group_size=(size if size in (32, 64, 128, 192) else "channel") if scheme == "int4" else None,
        symmetric=entry.get("symmetric") if scheme == "int4" else None,
        granularity=entry.get("granularity") if scheme == "fp8" else None,
        activations=activations.get("scheme"),
        activation_scale=activations.get("scale"),
    )
