"""What calibration will cost, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plansmith_errors import QuantizeError
from quantize.weight_rule import Method

_SHARE_OF_PEAK = 0.5  # of the speed of a large matrix product: small ones, norms, attention and rounding are slower
_BFLOAT16_SPEED = 3.0  # of its products to those of float32
# out * in * in, times two, beside the factorization
_AWQ_PRODUCTS, _GPTQ_PRODUCTS, _CORRECTION_PRODUCTS = 1.5, 0.5, 2.5
_SECONDS_PER_ROUNDING = {"rtn": 5e-9, "importance": 1e-8, "awq": 6e-8, "gptq": 4e-8}  # of one weight


@dataclass(frozen=True)
class CostEstimate:
    num_samples: int
    sequence_length: int
    flops: float
    seconds: float
    ram_bytes: float  # beyond the memory-mapped source
    disk_bytes: float  # of the temporary file of activations
    purpose: str = "calibrating"

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.sequence_length


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer: of every input its linears (all rows of them) and columns."""

    rows_and_columns: tuple[tuple[int, int], ...]
    method: Method
    shares: tuple[float, ...] = ()  # of the tokens that each of them sees, of experts on average; empty: all see all
    compensates_drift: bool = True

    @property
    def num_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.rows_and_columns)

    @property
    def active_weights(self) -> float:
        """Weights that an average token is multiplied with."""
        return sum(share * rows * columns for (rows, columns), share in self._with_shares())

    @property
    def is_corrected(self) -> bool:
        """Whether drift from the unquantized model's inputs is measured and made good."""
        return self.compensates_drift and self.method in ("awq", "gptq")

    @property
    def is_seen_before(self) -> bool:
        """Whether it runs once more with weights that are not rounded: to count experts, or for AWQ's factors."""
        return bool(self.shares and min(self.shares) < 1) or (self.method == "awq" and not self.compensates_drift)

    def search_flops(self) -> float:
        products = {"awq": _AWQ_PRODUCTS, "gptq": _GPTQ_PRODUCTS}.get(self.method, 0.0)
        products += _CORRECTION_PRODUCTS if self.is_corrected else 0.0
        factor = {"awq": 1 / 3, "gptq": 2 / 3}.get(self.method, 0)  # Cholesky, for the targets and for GPTQ's feedback
        return sum(2 * products * rows * columns**2 + factor * columns**3 for rows, columns in self.rows_and_columns)

    def gram_flops(self, num_tokens: int) -> float:
        if self.method == "importance":
            return 0.0
        halves = 2 if self.method == "awq" else 1  # of symmetric products: its factors', the rounding's
        compared = 2.0 if self.is_corrected else 0.0
        return sum(
            num_tokens * share * columns * (halves * columns + compared * min(rows, columns))  # and with what is exact
            for (rows, columns), share in self._with_shares()
        )

    def rounding_bytes(self, num_tokens: int) -> float:
        """Of one set of linears at a time: moments, what these are compared with, weights twice, and values.

        The moments of all experts at once; of one with few tokens these are kept instead (ExpertGram).
        """
        one, experts = 0.0, 0.0
        for (rows, columns), share in self._with_shares():
            size = 9.0 * rows * columns
            if self.method != "importance" and share == 1.0:
                size += 4.0 * columns * (columns + min(rows, columns))
            elif self.method != "importance":
                experts += 4.0 * columns * min(columns, num_tokens * share)
            one = max(one, size)
        return one + experts

    def _with_shares(self) -> Iterator[tuple[tuple[int, int], float]]:
        return zip(self.rows_and_columns, self.shares or (1.0,) * len(self.rows_and_columns), strict=True)


def estimate_cost(
    layers: Sequence[LayerShape],
    hidden_size: int,
    num_samples: int,
    sequence_length: int,
    max_activation_bytes: float,
    *,
    keep: bool = False,
    bfloat16: bool = False,
) -> CostEstimate:
    """Every layer runs once, for awq and gptq beside the unquantized one; where experts are counted, once more.

    ``keep``: a layer's inputs and its outputs are both kept on the disk. ``bfloat16``: weights are held and multiplied
    in it.
    """
    weight_bytes = 2.0 if bfloat16 else 4.0
    num_tokens = num_samples * sequence_length
    streams = 2 if any(layer.is_corrected for layer in layers) else 1
    runs = [streams + layer.is_seen_before for layer in layers]
    forward = sum(count * 2.0 * layer.active_weights * num_tokens for count, layer in zip(runs, layers, strict=True))
    attention = sum(runs) * 4.0 * num_tokens * sequence_length * hidden_size
    flops = forward + attention + sum(layer.gram_flops(num_tokens) + layer.search_flops() for layer in layers)
    rounding = sum(layer.num_weights * _SECONDS_PER_ROUNDING[layer.method] for layer in layers)
    activations = streams * 4.0 * num_tokens * hidden_size
    spilled = activations if activations > max_activation_bytes / 2 else 0.0
    layer_bytes = (weight_bytes * layer.num_weights + layer.rounding_bytes(num_tokens) for layer in layers)
    return CostEstimate(
        num_samples=num_samples,
        sequence_length=sequence_length,
        flops=flops,
        seconds=seconds_of(flops) / (_BFLOAT16_SPEED if bfloat16 else 1.0) + rounding,
        ram_bytes=max(layer_bytes, default=0.0) + min(3 * activations, max_activation_bytes),  # within a layer, too
        disk_bytes=2 * activations if keep else spilled,
    )


def seconds_of(flops: float) -> float:
    """How long layers of this many floating-point operations take on this machine."""
    return flops / (_SHARE_OF_PEAK * _flops_per_second())


def check_limit(cost: CostEstimate, max_seconds: float | None) -> None:
    """Raises QuantizeError, with a number of samples that would fit, when the estimate passes the limit."""
    if max_seconds is None or cost.seconds <= max_seconds:
        return
    fitting = max(1, int(cost.num_samples * max_seconds / cost.seconds))
    raise QuantizeError(
        f"calibration is estimated at {cost.seconds:.0f} s ({cost.flops / 1e12:.1f} TFLOP), calibration.max_seconds "
        f"allows {max_seconds:g}; set calibration.num_samples to {fitting} instead of {cost.num_samples}, "
        "or method importance, or raise the limit"
    )


def _flops_per_second() -> float:
    """Of this machine, now: a matrix product of 0.3 GFLOP, the best of forty, since others may be at work too."""
    factor = np.ones((512, 512), np.float32)
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - start)
    return 2.0 * 512**3 / min(seconds)
