"""Which rotary position embedding a model uses, read from every place where its config may keep it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from builder.config_reader import ConfigReader
from plansmith_errors import BuildError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_DEFAULT_THETA, _MIXTRAL_THETA = 10000.0, 1e6  # of the families in transformers


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Parameters of ``transformers.modeling_rope_utils``, under its names. Unused ones keep their defaults."""

    rope_type: RopeType
    theta: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that this embedding is defined for."""
        stretched = {
            "linear": self.factor * self.max_position_embeddings,
            "dynamic": self.factor * self.max_position_embeddings,
            "yarn": self.factor * self.original_max_position_embeddings,
        }
        return max(self.max_position_embeddings, int(stretched.get(self.rope_type, 0)))


def read_rope(config: ConfigReader) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5), ``rope_scaling`` with "rope_type" or "type", and ``rope_theta``.

    Raises BuildError on an unknown type, a missing parameter or a partial rotation.
    """
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, config.where)
    if any(isinstance(value, dict) for value in scaling.config.values()):
        raise BuildError(f"{scaling.where}: the rotary embedding differs between layers, which is not supported")
    rope_type = _rope_type(scaling)
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise BuildError(
            f"{config.where}: partial_rotary_factor is {partial!r}; only a full rotation (1.0) is supported"
        )
    limit = config.integer("max_position_embeddings")
    theta = _MIXTRAL_THETA if config.get("model_type") == "mixtral" else _DEFAULT_THETA
    top_level = config.get("original_max_position_embeddings") and config.integer("original_max_position_embeddings")
    spec = RopeSpec(
        rope_type=rope_type,
        theta=scaling.optional_float("rope_theta") or config.positive_float("rope_theta", theta),
        max_position_embeddings=limit,
        original_max_position_embeddings=top_level or scaling.integer("original_max_position_embeddings", limit),
        factor=_factor(scaling, rope_type),
    )
    return _with_parameters_of_type(spec, scaling)


def _rope_type(scaling: ConfigReader) -> RopeType:
    found = scaling.get("rope_type") or scaling.get("type") or "default"
    if found not in get_args(RopeType):
        kinds = ", ".join(get_args(RopeType))
        raise BuildError(f"{scaling.where}: rope type {found!r} is not supported; supported types: {kinds}")
    return cast("RopeType", found)


def _factor(scaling: ConfigReader, rope_type: RopeType) -> float:
    if rope_type == "default":
        return 1.0
    factor = scaling.positive_float("factor")
    if factor < 1.0:
        raise BuildError(f"{scaling.where}: factor is {factor}; expected 1.0 or more")
    return factor


def _with_parameters_of_type(spec: RopeSpec, scaling: ConfigReader) -> RopeSpec:
    if spec.rope_type == "llama3":
        low, high = scaling.positive_float("low_freq_factor"), scaling.positive_float("high_freq_factor")
        if high <= low:
            raise BuildError(f"{scaling.where}: high_freq_factor {high} must be above low_freq_factor {low}")
        return replace(spec, low_freq_factor=low, high_freq_factor=high)
    if spec.rope_type == "yarn":
        return replace(
            spec,
            beta_fast=scaling.positive_float("beta_fast", 32.0),
            beta_slow=scaling.positive_float("beta_slow", 1.0),
            attention_factor=scaling.optional_float("attention_factor"),
            mscale=scaling.optional_float("mscale"),
            mscale_all_dim=scaling.optional_float("mscale_all_dim"),
            truncate=scaling.boolean("truncate", True),
        )
    return spec
