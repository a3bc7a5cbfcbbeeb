"""Which scheme each weight of a Hugging Face directory has, read from its quantization_config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plansmith_errors import CheckpointError
from quantize.architectures import role_of
from quantize.checkpoint import Checkpoint, parse_json_object
from quantize.export.scheme import NOT_QUANTIZED, LinearScheme, scheme_of
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

    def of(self, name: str) -> LinearScheme:
        """The scheme of the weight ``name``."""
        if name in self.by_name:
            return self.by_name[name]
        return (
            self.linears
            if role_of(name) == "linear" and name.removesuffix(".weight") not in self.ignored
            else NOT_QUANTIZED
        )


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
    group = next(iter(groups.values()), None) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{checkpoint.path}: quantization_config: expected one group of weights in config_groups")
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
    known = {
        (4, "int", "group"): LinearScheme("int4", weights.get("group_size"), weights.get("symmetric") is not False),
        (8, "int", "channel"): LinearScheme("int8"),
        (8, "float", "channel"): LinearScheme("fp8"),
    }
    if kind not in known:
        raise CheckpointError(
            f"{checkpoint.path}: weights of {kind[0]} bits, type {kind[1]!r}, strategy {kind[2]!r} are not known here; "
            "known: int4 in groups, int8 and fp8 per channel"
        )
    return HfScheme(compressed_tensors_parts, {}, known[kind], _names(checkpoint, config, "ignore"))


def _modelopt(checkpoint: Checkpoint) -> HfScheme:
    path = checkpoint.path / "hf_quant_config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the ModelOpt layout has it beside config.json")
    config = parse_json_object(path.read_bytes(), str(path)).get("quantization")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a mapping under 'quantization'")
    algorithm = config.get("quant_algo")
    ignored = _names(checkpoint, config, "exclude_modules")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return HfScheme(modelopt_parts, {}, LinearScheme("fp8"), ignored)
    if algorithm == "W4A16_AWQ":
        return HfScheme(modelopt_parts, {}, LinearScheme("int4", config.get("group_size")), ignored, True)
    raise CheckpointError(
        f"{path}: quant_algo {json.dumps(algorithm)} is not known here; known: W4A16_AWQ, FP8_PER_CHANNEL_PER_TOKEN"
    )


def _names(checkpoint: Checkpoint, config: Mapping[str, Any], key: str) -> frozenset[str]:
    names = config.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{checkpoint.path}: {key} is {names!r}, expected a list of module names")
    return frozenset(names)
