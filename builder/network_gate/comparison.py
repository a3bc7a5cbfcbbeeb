"""A step's logits against the reference's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.log_softmax import log_softmax_parts
from builder.network_gate.bounds import Bounds

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Errors:
    """Of each token."""

    rms: npt.NDArray[np.float64]  # in standard deviations of the reference's logits
    largest: npt.NDArray[np.float64]  # the same
    kl: npt.NDArray[np.float64]  # KL(reference || network), in nats
    same_argmax: npt.NDArray[np.bool_]
    deviation: float  # standard deviation of the reference's logits, mean over the tokens

    def outliers(self, bounds: Bounds) -> npt.NDArray[np.bool_]:
        """Tokens beyond a bound; one that is not a number is beyond all."""
        within = (self.rms <= bounds.rms_error) & (self.largest <= bounds.max_error)
        return ~(within & (self.kl <= bounds.kl(self.deviation)))


def compare_logits(found: Logits, expected: Logits) -> Errors:
    """``found`` and ``expected``: [num_tokens, vocab_size].

    A token within bounds whose likeliest continuation differs had two logits that are nearer to each other than twice
    the bound of the largest error.
    """
    deviation = float(expected.std(axis=-1, dtype=np.float64).mean())
    errors = np.abs(found.astype(np.float64) - expected) / deviation
    return Errors(
        rms=np.sqrt(np.square(errors).mean(axis=-1)),
        largest=errors.max(axis=-1),
        kl=_kl(found, expected),
        same_argmax=found.argmax(axis=-1) == expected.argmax(axis=-1),
        deviation=deviation,
    )


@dataclass(frozen=True)
class StepResult:
    """What is said of a step. Errors are in standard deviations of the reference's logits."""

    number: int
    what: str  # for a reader: "prefill of 35 and 2 decoding"
    num_tokens: int
    rms_error: float  # of the worst token
    max_error: float  # of any logit
    max_abs_error: float  # the same, as a difference of logits
    same_argmax: int  # tokens
    kl: float  # mean over the tokens, in nats
    num_outliers: int  # tokens beyond a bound


def step_result(number: int, what: str, errors: Errors, bounds: Bounds) -> StepResult:
    return StepResult(
        number=number,
        what=what,
        num_tokens=len(errors.rms),
        rms_error=float(errors.rms.max()),
        max_error=float(errors.largest.max()),
        max_abs_error=float(errors.largest.max()) * errors.deviation,
        same_argmax=int(errors.same_argmax.sum()),
        kl=float(errors.kl.mean()),
        num_outliers=int(errors.outliers(bounds).sum()),
    )


def _kl(found: Logits, expected: Logits) -> npt.NDArray[np.float64]:
    """As ``builder.comparison`` has it; 0 where it is below by rounding alone."""
    shifted, _, log_sum = log_softmax_parts(found)
    base_shifted, exponentials, base_log_sum = log_softmax_parts(expected)
    weighted = (exponentials * (base_shifted - shifted)).sum(axis=-1, dtype=np.float64)
    kl: npt.NDArray[np.float64] = weighted / exponentials.sum(axis=-1, dtype=np.float64) - base_log_sum + log_sum
    return np.maximum(kl, 0.0)
