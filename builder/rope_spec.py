"""Which rotary position embedding a model uses, read from every place where its config may keep it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from builder.config_reader import ConfigReader
from plansmith_errors import BuildError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
_DEFAULT_THETA, _MIXTRAL_THETA = 10000.0, 1e6  # of the families in transformers
_GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 1e6, 10000.0
_PHI3_TYPES = ("default", "longrope")
_PHI3_OLD_NAMES = ("su", "yarn")  # of longrope, in early configs


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
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, [rotary_dim / 2]
    long_factors: tuple[float, ...] = ()  # longrope, of engines for more than the original positions
    partial_rotary_factor: float = 1.0  # share of a head's features that turn, the first ones

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that this embedding is defined for."""
        stretched = {
            "linear": self.factor * self.max_position_embeddings,
            "dynamic": self.factor * self.max_position_embeddings,
            "yarn": self.factor * self.original_max_position_embeddings,
        }
        return max(self.max_position_embeddings, int(stretched.get(self.rope_type, 0)))

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's features turn, in pairs of one from each half of them; those after stay as they are."""
        return int(head_dim * self.partial_rotary_factor)

    def takes_long_factors(self, max_seq_len: int) -> bool:
        """Whether an engine for sequences of ``max_seq_len`` tokens has longrope's long factors, at every length."""
        return self.rope_type == "longrope" and max_seq_len > self.original_max_position_embeddings


def read_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotary embedding, and that of sliding layers where the family gives them their own.

    Reads ``rope_parameters`` (transformers 5), ``rope_scaling`` with "rope_type" or "type", and ``rope_theta``. Raises
    BuildError on an unknown type, a missing parameter or a rotation that the family does not have.
    """
    if config.get("model_type") == "gemma3_text":
        return _read_gemma3_ropes(config, head_dim)
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, config.where)
    if any(isinstance(value, dict) for value in scaling.config.values()):
        raise BuildError(f"{scaling.where}: the rotary embedding differs between layers, which is not supported")
    theta = _MIXTRAL_THETA if config.get("model_type") == "mixtral" else _DEFAULT_THETA
    return _read_rope(config, scaling, config.positive_float("rope_theta", theta), head_dim), None


def _read_gemma3_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers with full attention and of those that slide, which are never scaled in older configs."""
    by_type = config.section("rope_parameters")
    nothing = ConfigReader({}, config.where)
    if by_type is None:
        full, local = config.section("rope_scaling") or nothing, nothing
    elif {"full_attention", "sliding_attention"} & by_type.config.keys():
        full = by_type.section("full_attention") or nothing
        local = by_type.section("sliding_attention") or nothing
    else:
        raise BuildError(f"{by_type.where}: expected a mapping for full_attention and one for sliding_attention")
    theta = config.positive_float("rope_theta", _GEMMA3_THETA)
    local_theta = config.positive_float("rope_local_base_freq", _GEMMA3_LOCAL_THETA)
    return _read_rope(config, full, theta, head_dim), _read_rope(config, local, local_theta, head_dim)


def _read_rope(config: ConfigReader, scaling: ConfigReader, theta: float, head_dim: int) -> RopeSpec:
    """``theta``: where ``scaling`` has none."""
    rope_type = _rope_type(config, scaling)
    limit = config.integer("max_position_embeddings")
    top_level = config.get("original_max_position_embeddings") and config.integer("original_max_position_embeddings")
    spec = RopeSpec(
        rope_type=rope_type,
        theta=scaling.optional_float("rope_theta") or theta,
        max_position_embeddings=limit,
        original_max_position_embeddings=top_level or scaling.integer("original_max_position_embeddings", limit),
        factor=_factor(scaling, rope_type),
        partial_rotary_factor=_partial_rotary_factor(config, scaling, head_dim),
    )
    return _with_parameters_of_type(spec, scaling, head_dim)


def _partial_rotary_factor(config: ConfigReader, scaling: ConfigReader, head_dim: int) -> float:
    # transformers computes a part of the head's features in Phi-3 alone.
    partial = scaling.optional_float("partial_rotary_factor") or config.optional_float("partial_rotary_factor") or 1.0
    if partial == 1.0:
        return partial
    if config.get("model_type") != "phi3":
        raise BuildError(
            f"{config.where}: partial_rotary_factor is {partial!r}; only a full rotation (1.0) is supported"
        )
    rotary_dim = int(head_dim * partial)
    if partial > 1.0 or rotary_dim % 2 or rotary_dim < 2:
        raise BuildError(
            f"{config.where}: partial_rotary_factor {partial!r} turns {rotary_dim} of {head_dim} features; "
            "expected an even number of them"
        )
    return partial


def _rope_type(config: ConfigReader, scaling: ConfigReader) -> RopeType:
    found, known = scaling.get("rope_type") or scaling.get("type") or "default", get_args(RopeType)
    if config.get("model_type") == "phi3":
        found, known = "longrope" if found in _PHI3_OLD_NAMES else found, _PHI3_TYPES
    if found not in known:
        raise BuildError(f"{scaling.where}: rope type {found!r} is not supported; supported types: {', '.join(known)}")
    return cast("RopeType", found)


def _factor(scaling: ConfigReader, rope_type: RopeType) -> float:
    if rope_type == "default":
        return 1.0
    # longrope's is the ratio of the lengths unless it is given.
    factor = scaling.positive_float("factor", 1.0 if rope_type == "longrope" else None)
    if factor < 1.0:
        raise BuildError(f"{scaling.where}: factor is {factor}; expected 1.0 or more")
    return factor


def _with_parameters_of_type(spec: RopeSpec, scaling: ConfigReader, head_dim: int) -> RopeSpec:
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
    if spec.rope_type == "longrope":
        count = spec.rotary_dim(head_dim) // 2
        ratio = spec.max_position_embeddings / spec.original_max_position_embeddings
        return replace(
            spec,
            factor=scaling.positive_float("factor", ratio),
            attention_factor=scaling.optional_float("attention_factor"),
            short_factors=scaling.positive_floats("short_factor", count),
            long_factors=scaling.positive_floats("long_factor", count),
        )
    return spec
