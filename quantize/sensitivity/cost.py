"""What measuring sensitivity will cost, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plansmith_errors import QuantizeError
from quantize.calibration.estimate import CostEstimate, seconds_of

_SECONDS_PER_ROUNDING = 1e-8  # of one weight, to the bytes and back
_LOGITS_BYTES = 5 * 2.0**24  # blocks of logits, their differences and exponentials


@dataclass(frozen=True)
class LayerWork:
    num_weights: int
    num_units: int  # sets to choose for


@dataclass(frozen=True)
class SensitivityWork:
    """Sizes of a measurement. With ``copies`` every unit's changed model runs to its logits."""

    layers: Sequence[LayerWork]
    num_candidates: int
    hidden_size: int
    vocab_size: int
    num_samples: int
    sequence_length: int
    copies: bool

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.sequence_length

    @property
    def num_units(self) -> int:
        return sum(layer.num_units for layer in self.layers)

    def estimate(self, max_activation_bytes: float) -> CostEstimate:
        """``max_activation_bytes``: copies above this lie in a file."""
        flops, started = 0.0, 0
        for layer in self.layers:
            passes = 1 + layer.num_units * self.num_candidates + (started if self.copies else 0)
            attention = 4.0 * self.num_tokens * self.sequence_length * self.hidden_size
            flops += passes * (2.0 * layer.num_weights * self.num_tokens + attention)
            started += layer.num_units
        if self.copies:
            flops += 2.0 * (1 + self.num_units) * self.num_tokens * self.hidden_size * self.vocab_size
        rounding = sum(layer.num_weights for layer in self.layers) * self.num_candidates * _SECONDS_PER_ROUNDING
        hidden = 4.0 * self.num_tokens * self.hidden_size
        copied = hidden * self.num_units if self.copies else 0.0
        spilled = copied if copied > max_activation_bytes else 0.0
        largest = max(layer.num_weights for layer in self.layers)
        return CostEstimate(
            num_samples=self.num_samples,
            sequence_length=self.sequence_length,
            flops=flops,
            seconds=seconds_of(flops) + rounding,
            ram_bytes=12.0 * largest + 4 * hidden + copied - spilled + (_LOGITS_BYTES if self.copies else 0.0),
            disk_bytes=spilled,
            purpose="measuring sensitivity",
        )


def check_sensitivity_limit(cost: CostEstimate, max_seconds: float | None, *, copies: bool) -> None:
    """Raises QuantizeError when the estimate passes the limit."""
    if max_seconds is None or cost.seconds <= max_seconds:
        return
    cheaper = "sensitivity output, or " if copies else ""
    raise QuantizeError(
        f"measuring sensitivity is estimated at {cost.seconds:.0f} s ({cost.flops / 1e12:.1f} TFLOP), "
        f"calibration.max_seconds allows {max_seconds:g}; choose {cheaper}fewer auto.num_samples than "
        f"{cost.num_samples} or a shorter auto.sequence_length than {cost.sequence_length}, or raise the limit"
    )
