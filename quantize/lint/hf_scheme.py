"""Which scheme each weight of a Hugging Face directory has, read from its quantization_config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plansmith_errors import CheckpointError
from quantize.architectures import role_of
from quantize.checkpoint import Checkpoint, parse_json_object
from quantize.export.compressed_tensors_schemes import scheme_described
from quantize.export.modelopt_schemes import scheme_named
from quantize.export.scheme import NOT_QUANTIZED, LinearScheme, scheme_of
from quantize.foreign.recognize import MODELOPT_CONFIG
from quantize.lint.parts import NEUTRAL, Parts, compressed_tensors_parts, modelopt_parts, neutral_parts
from quantize.quantized_tensor import QUANT_METHOD


@dataclass(frozen=True)
class HfScheme:
    """``by_name`` wins; else linears of the decoder have ``linears`` unless their module is in ``ignored``."""

    parts: Parts = neutral_parts
    by_name: Mapping[str, LinearScheme] = field(default_factory=dict)
    linears: LinearScheme = NOT_QUANTIZED
    ignored: frozenset[str] = frozenset()
    allows_pre_quant_scale: bool = False
    has_kv_scales: bool = False
    kv_in_linear: bool = True  # scales of keys and values belong to k_proj and v_proj, not to the attention module

    def of(self, name: str) -> LinearScheme:
        """The scheme of the weight ``name``."""
        if name in self.by_name:
            return self.by_name[name]
        return (
            self.linears
            if role_of(name) == "linear" and name.removesuffix(".weight") not in self.ignored
            else NOT_QUANTIZED
        )


def is_known(checkpoint: Checkpoint) -> bool:
    """Whether each tensor's name, shape and type follow from the configuration by the rules here."""
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") == QUANT_METHOD:
        return not (checkpoint.path / MODELOPT_CONFIG).is_file()
    try:
        read_scheme(checkpoint)
    except CheckpointError:
        return False
    return True


def read_scheme(checkpoint: Checkpoint) -> HfScheme:
    """Raises CheckpointError for a quantization that no layout here describes."""
    config = checkpoint.config.get("quantization_config")
    if config is None:
        return HfScheme()
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint.path}: quantization_config is {config!r}, expected a mapping")
    method = config.get("quant_method")
    if method == QUANT_METHOD:
        return _neutral(checkpoint, config)
    if method == "compressed-tensors":
        return _compressed_tensors(checkpoint, config)
    if method == "modelopt":
        return _modelopt(checkpoint)
    raise CheckpointError(
        f"{checkpoint.path}: is quantized by {method!r}; known are {QUANT_METHOD}, compressed-tensors and modelopt"
    )


def _neutral(checkpoint: Checkpoint, config: Mapping[str, Any]) -> HfScheme:
    entries = config.get("tensors")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CheckpointError(f"{checkpoint.path}: quantization_config does not describe tensors as expected")
    try:
        schemes = {name: scheme_of(entry) for name, entry in entries.items()}
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: quantization_config: {error}") from None
    for name, scheme in schemes.items():
        if scheme.name not in NEUTRAL:
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has the scheme {scheme.name!r}, unknown here")
    return HfScheme(by_name=schemes, has_kv_scales="kv_cache" in config)


def _compressed_tensors(checkpoint: Checkpoint, config: Mapping[str, Any]) -> HfScheme:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{checkpoint.path}: quantization_config: config_groups is {groups!r}, expected groups")
    ignored = _names(checkpoint, config, "ignore")
    has_kv_scales = config.get("kv_cache_scheme") is not None
    found = [(_described(checkpoint, group), group.get("targets")) for group in groups.values()]
    if len(found) == 1 and found[0][1] == ["Linear"]:
        return HfScheme(
            compressed_tensors_parts, {}, found[0][0], ignored, has_kv_scales=has_kv_scales, kv_in_linear=False
        )
    by_name: dict[str, LinearScheme] = {}
    for scheme, targets in found:
        if not isinstance(targets, list) or not all(isinstance(name, str) and ":" not in name for name in targets):
            raise CheckpointError(f"{checkpoint.path}: targets are {targets!r}; known here are Linear and module names")
        by_name |= {f"{name}.weight": scheme for name in targets}
    return HfScheme(compressed_tensors_parts, by_name, ignored=ignored, has_kv_scales=has_kv_scales, kv_in_linear=False)


def _described(checkpoint: Checkpoint, group: Mapping[str, Any]) -> LinearScheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not (inputs is None or isinstance(inputs, dict)):
        raise CheckpointError(f"{checkpoint.path}: quantization_config: expected weights in every one of config_groups")
    scheme = scheme_described(weights, inputs)
    if scheme is None:
        raise CheckpointError(
            f"{checkpoint.path}: weights of {weights.get('num_bits')} bits, type {weights.get('type')!r}, strategy "
            f"{weights.get('strategy')!r} are not known here; known: int4 groups, int8 channels, fp8, nvfp4, mxfp4"
        )
    return scheme


def _modelopt(checkpoint: Checkpoint) -> HfScheme:
    path = checkpoint.path / MODELOPT_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the ModelOpt layout has it beside config.json")
    config = parse_json_object(path.read_bytes(), str(path)).get("quantization")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a mapping under 'quantization'")
    ignored = _names(checkpoint, config, "exclude_modules")
    has_kv_scales = config.get("kv_cache_quant_algo") is not None
    if config.get("quant_algo") != "MIXED_PRECISION":
        scheme = _named(path, config)
        return HfScheme(modelopt_parts, {}, scheme, ignored, _may_multiply(scheme), has_kv_scales)
    layers = config.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise CheckpointError(f"{path}: quantized_layers is {layers!r}, expected a mapping of modules")
    by_name = {f"{name}.weight": _named(path, layer) for name, layer in layers.items()}
    multiplies = any(map(_may_multiply, by_name.values()))
    return HfScheme(modelopt_parts, by_name, NOT_QUANTIZED, ignored, multiplies, has_kv_scales)


def _named(path: Path, config: Mapping[str, Any]) -> LinearScheme:
    scheme = scheme_named(config)
    if scheme is None:
        raise CheckpointError(f"{path}: quant_algo {json.dumps(config.get('quant_algo'))} is not known here")
    return scheme


def _may_multiply(scheme: LinearScheme) -> bool:
    """Whether ModelOpt stores factors of the inputs where it could not fold them."""
    return scheme.name == "int4" or (scheme.name == "int8" and scheme.activations is not None)


def _names(checkpoint: Checkpoint, config: Mapping[str, Any], key: str) -> frozenset[str]:
    names = config.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{checkpoint.path}: {key} is {names!r}, expected a list of module names")
    return frozenset(names)
