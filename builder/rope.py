"""Rotary position embeddings: inverse frequencies and attention scaling of each type, as transformers defines them.

RoPE: arXiv 2104.09864. YaRN: arXiv 2309.00071. LongRoPE: arXiv 2402.13753. The others:
``transformers.modeling_rope_utils``.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from builder.rope_spec import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int, max_seq_len: int) -> tuple[npt.NDArray[np.float32], float]:
    """Return the inverse frequencies [rotary_dim / 2], in radians per position, and the factor of cos and sin.

    ``rope.rotary_dim(head_dim)`` is head_dim but for a partial rotation: the features after it do not turn.

    An engine is compiled for one ``max_seq_len``, so dynamic NTK is static here: the plain frequencies up to
    ``max_position_embeddings``, and beyond it NTK stretched to ``max_seq_len`` for every position. So is longrope: the
    short factors up to ``original_max_position_embeddings``, and beyond it the long ones for every sequence.
    """
    attention_factor, rotary_dim = 1.0, rope.rotary_dim(head_dim)
    if rope.rope_type == "dynamic":
        inverse = _inverse_frequencies(_ntk_theta(rope, rotary_dim, max_seq_len), rotary_dim)
    else:
        inverse = _inverse_frequencies(rope.theta, rotary_dim)
    if rope.rope_type == "linear":
        inverse = inverse / rope.factor
    elif rope.rope_type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.rope_type == "yarn":
        inverse, attention_factor = _yarn(rope, inverse), _yarn_attention_factor(rope)
    elif rope.rope_type == "longrope":
        factors = rope.long_factors if rope.takes_long_factors(max_seq_len) else rope.short_factors
        inverse, attention_factor = inverse / np.array(factors), _longrope_attention_factor(rope)
    return inverse.astype(np.float32), attention_factor


def _inverse_frequencies(theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    exponents: npt.NDArray[np.float64] = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return 1.0 / np.power(theta, exponents)


def _ntk_theta(rope: RopeSpec, head_dim: int, max_seq_len: int) -> float:
    length = max(max_seq_len, rope.max_position_embeddings)
    stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeSpec, inverse: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keep short wavelengths, divide long ones by ``factor``, blend between."""
    rotations = rope.original_max_position_embeddings * inverse / (2 * math.pi)
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeSpec, inverse: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Extrapolate the dimensions that turn often within the original context, interpolate those that turn rarely."""
    head_dim = 2 * len(inverse)
    low, high = (_correction_dim(rope, head_dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # as transformers does: the ramp must not divide by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / rope.factor * interpolated + inverse * (1.0 - interpolated)


def _correction_dim(rope: RopeSpec, head_dim: int, rotations: float) -> float:
    """The dimension that turns ``rotations`` times within the original context."""
    wavelengths = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _longrope_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
