"""The planner's view of any model it knows, from config.json alone: also of families that cannot be built yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from builder.config_reader import ConfigReader
from builder.model_spec import SUPPORTED_MODEL_TYPES, ModelSpec
from builder.planner.decoder_shape import DecoderShape
from builder.planner.from_spec import shape_of_spec
from builder.planner.latent import read_latent
from plansmith_errors import BuildError

_WITH_A_LANGUAGE_PART = ("gemma3",)  # which ModelSpec takes out of the whole
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def read_decoder_shape(config: Mapping[str, Any], source: str = "config.json") -> DecoderShape:
    """Raises BuildError where a key is missing or wrong, and for a family whose shape is not known."""
    model_type = config.get("model_type")
    if model_type in (*SUPPORTED_MODEL_TYPES, *_WITH_A_LANGUAGE_PART):
        return _supported(config, source)
    if model_type in _LATENT_TYPES:
        shape = read_latent(ConfigReader(config, source))
        return replace(shape, why_not_built=f"architecture {model_type!r} cannot be built yet")
    known = ", ".join((*SUPPORTED_MODEL_TYPES, *_LATENT_TYPES))
    raise BuildError(f"{source}: model_type {model_type!r} cannot be planned for; known architectures: {known}")


def _supported(config: Mapping[str, Any], source: str) -> DecoderShape:
    try:
        return shape_of_spec(ModelSpec.from_hf_config(config))
    except BuildError as error:
        raise BuildError(str(error).replace("config.json", source, 1)) from None
