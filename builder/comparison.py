"""What an engine gives away against another on the same text: KL divergence, top-1 agreement, error of the logits.

Both engines run in step, chunk by chunk, and their logits are reduced at once: memory does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.log_softmax import ROWS, log_softmax_parts
from builder.scoring import Perplexity
from builder.windows import check_windows, chunk_size, prefill_logits, split_windows
from plansmith_errors import EngineError
from plugins.inflight_batching.step import StepEngine

Progress = Callable[[int, int, str], None]
"""Called after each window with how many are done, how many there are, and a label."""


@dataclass(frozen=True)
class Comparison:
    """Means are over the ``perplexity.num_scored`` positions that predict a token of the text."""

    perplexity: Perplexity
    baseline_perplexity: Perplexity
    kl_per_token: float  # mean KL(baseline || engine), in nats
    top1_agreement: float  # share of positions at which both engines' likeliest token is the same
    mean_logit_error: float  # mean of |logit - baseline's logit|, over the vocabulary too
    max_logit_error: float


@dataclass
class _Sums:
    """Over positions, in float64."""

    positions: int = 0
    nll: float = 0.0
    baseline_nll: float = 0.0
    kl: float = 0.0
    same_top1: int = 0
    logit_error: float = 0.0  # of each position, the mean over the vocabulary
    max_logit_error: float = 0.0


def compare_engines(
    engine: StepEngine,
    baseline: StepEngine,
    token_ids: Sequence[int],
    *,
    window: int = 512,
    max_windows: int = 8,
    progress: Progress | None = None,
) -> Comparison:
    """Measure ``engine`` against ``baseline`` on the windows that ``perplexity`` scores.

    Blocks from 0 on of both engines are overwritten. Raises EngineError when vocabularies differ, a window does not
    fit, there is nothing to score, or an engine gives logits that are not finite.
    """
    sizes = engine.limits.vocab_size, baseline.limits.vocab_size
    if sizes[0] != sizes[1]:
        raise EngineError(
            f"the engine has {sizes[0]} tokens in its vocabulary, the one it is held against has {sizes[1]}; "
            "compare engines of one model"
        )
    windows = split_windows(token_ids, window, max_windows)
    check_windows(windows, window, engine, baseline)
    sums, chunk = _Sums(), chunk_size(engine, baseline)
    for done, ids in enumerate(windows, 1):
        ours, theirs = prefill_logits(engine, ids[:-1], chunk), prefill_logits(baseline, ids[:-1], chunk)
        for (start, logits), (_, base) in zip(ours, theirs, strict=True):
            _add(sums, logits, base, ids[start + 1 : start + 1 + len(logits)])
        if progress is not None:
            progress(done, len(windows), f"window of {len(ids)} tokens")
    if not sums.positions:
        raise EngineError(f"a comparison needs a text of 2 tokens or more; found {len(token_ids)}")
    return _means(sums)


def _add(
    sums: _Sums, logits: npt.NDArray[np.float32], base: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]
) -> None:
    for begin in range(0, len(targets), ROWS):
        rows = slice(begin, begin + ROWS)
        _add_rows(sums, logits[rows], base[rows], targets[rows])


def _add_rows(
    sums: _Sums, logits: npt.NDArray[np.float32], base: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]
) -> None:
    error = np.abs(logits - base)
    largest = float(error.max())
    if not np.isfinite(largest):
        raise EngineError("an engine gave logits that are not finite (NaN or infinity); build it with precision: exact")
    shifted, _, log_sum = log_softmax_parts(logits)
    base_shifted, base_exponentials, base_log_sum = log_softmax_parts(base)
    # KL(P || Q) = sum p (log p - log q). The normalisers are taken out of the sum: what is left is a difference of
    # logits, which float32 holds exactly where the engines agree, so that KL(P || P) is 0 and not a rounding error.
    weighted = (base_exponentials * (base_shifted - shifted)).sum(axis=-1, dtype=np.float64)
    kl = weighted / base_exponentials.sum(axis=-1, dtype=np.float64) - base_log_sum + log_sum
    chosen = np.arange(len(targets)), targets
    sums.positions += len(targets)
    sums.nll += float((log_sum - shifted[chosen]).sum())
    sums.baseline_nll += float((base_log_sum - base_shifted[chosen]).sum())
    sums.kl += float(kl.sum())
    sums.same_top1 += int((logits.argmax(axis=-1) == base.argmax(axis=-1)).sum())
    sums.logit_error += float(error.mean(axis=-1, dtype=np.float64).sum())
    sums.max_logit_error = max(sums.max_logit_error, largest)


def _means(sums: _Sums) -> Comparison:
    count = sums.positions
    return Comparison(
        perplexity=Perplexity.of_sum(sums.nll, count),
        baseline_perplexity=Perplexity.of_sum(sums.baseline_nll, count),
        kl_per_token=max(sums.kl / count, 0.0),  # below zero it can be by rounding alone
        top1_agreement=sums.same_top1 / count,
        mean_logit_error=sums.logit_error / count,
        max_logit_error=sums.max_logit_error,
    )
