"""How far a network's logits may be from the float32 reference, and where the numbers come from.

Rounding to nearest with p bits of significand moves a value by at most u = 2**-p of itself. The residual stream is
rounded twice in each layer and what is added to it about as often again; independent roundings add up as the square
root of their number, so that the root of the mean square of the logits' errors is about u * sqrt(4 * num_layers) of
their standard deviation. ``_MARGIN`` covers what that leaves out: activations that are larger than what they lead to,
and models that amplify. Measured: 2 to 7 times in SmolLM2-135M in float16, 2 to 5 in small random models.

float32 is as exact as its sums: of a thousand products, each rounded, sqrt(1000) * 2**-24.

Where the inputs of a linear, or keys and values, are rounded to few bits as well (fp8, int8, nvfp4), a difference of d,
which is a few u by then (4), flips some of those roundings: a share d / v of them, each by v, the rounding unit there.
That is sqrt(d * v) as the root of the mean square, and v / sqrt(1000) where there is but one among a token's thousand.

A router that chooses among experts chooses another where two scores are nearer to each other than the error before it.
Such a token is computed by another expert, and those after it see that: there is no bound for them. Below float32 half
of a mixture's tokens may be such outliers; in float32, where next to no scores are so near, none.

The largest of a million errors is 5 times their deviation, if they are normal: ``_LARGEST`` says 6. KL divergence is
half the variance of the logits' errors under the reference's probabilities, to second order; ``_KL_FLOOR`` is what the
sum of a vocabulary's float32 exponentials may be off by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from builder.targets.tensorrt.options import NetworkDtype

_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-19}
_INPUT_UNITS = {"fp8": 2.0**-4, "int8": 2.0**-6, "nvfp4": 2.0**-2}
"""Of a value as large as most are; int8's is a fixed step, of the largest value in 127."""
_DYNAMIC_INT8_CACHE = 2.0**-8  # a step of a head's largest key in 127, which is 3 times what most are, over sqrt(12)
_MARGIN = 16.0
_LARGEST = 6.0
_KL_FLOOR = 1e-6  # nats
_FEW = 4.0
_OUTLIER_SHARE = 0.5


@dataclass(frozen=True)
class Bounds:
    rms_error: float  # of each token's logits, in standard deviations of the reference's
    outlier_share: float = 0.0  # of tokens, in a model with experts

    @property
    def max_error(self) -> float:
        """Of any logit, in standard deviations."""
        return _LARGEST * self.rms_error

    def kl(self, deviation: float) -> float:
        """Nats per token, where the reference's logits have ``deviation``."""
        return (self.rms_error * deviation) ** 2 / 2 + _KL_FLOOR

    def outliers(self, num_tokens: int) -> int:
        """Tokens that may be beyond all of these bounds."""
        return int(self.outlier_share * num_tokens)


def bounds_of(
    dtype: NetworkDtype,
    num_layers: int,
    input_schemes: Iterable[str] = (),
    *,
    is_mixture: bool = False,
    int8_cache: bool = False,
) -> Bounds:
    """``input_schemes``: what inputs of linears, or keys and values, are rounded to in network and reference alike.

    ``int8_cache``: the network rounds keys and values with scales of its own, which the reference does not.
    """
    unit = _UNITS[dtype]
    if int8_cache:
        unit = max(unit, _DYNAMIC_INT8_CACHE)
    coarse = [_INPUT_UNITS[scheme] for scheme in input_schemes]
    unit = max([unit, *(max(sqrt(_FEW * unit * other), other / 32) for other in coarse)])
    return Bounds(
        rms_error=_MARGIN * unit * sqrt(4 * num_layers),
        outlier_share=_OUTLIER_SHARE if is_mixture and dtype != "float32" else 0.0,
    )
