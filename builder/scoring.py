"""Perplexity of a text, through any engine's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.log_softmax import ROWS, log_softmax_parts
from builder.windows import check_windows, chunk_size, prefill_logits, split_windows
from plansmith_errors import EngineError
from plugins.inflight_batching.step import StepEngine


@dataclass(frozen=True)
class Perplexity:
    nll_per_token: float  # mean negative log likelihood, in nats
    perplexity: float  # exp(nll_per_token)
    num_scored: int  # tokens

    @classmethod
    def of_sum(cls, total_nll: float, num_scored: int) -> Perplexity:
        """From a sum over ``num_scored`` tokens, in nats."""
        nll = total_nll / num_scored
        return cls(nll, math.exp(nll) if nll < 709 else math.inf, num_scored)  # exp(710) overflows float64


def perplexity(engine: StepEngine, token_ids: Sequence[int], *, window: int = 512, max_windows: int = 8) -> Perplexity:
    """Score ``token_ids`` in non-overlapping windows of ``window`` tokens; in each, all but the first token count.

    A last, shorter window is left out unless it is the only one. The engine's blocks from 0 on are overwritten, so it
    must serve nobody else. Raises EngineError when a window does not fit the engine or there is nothing to score.
    """
    windows = split_windows(token_ids, window, max_windows)
    check_windows(windows, window, engine)
    total, scored = 0.0, 0
    for ids in windows:
        for start, logits in prefill_logits(engine, ids[:-1], chunk_size(engine)):
            nll = _nll(logits, ids[start + 1 : start + 1 + len(logits)])
            total, scored = total + float(nll.sum()), scored + len(nll)
    if not scored:
        raise EngineError(f"perplexity needs a text of 2 tokens or more; found {len(token_ids)}")
    return Perplexity.of_sum(total, scored)


def _nll(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Negative log likelihood of ``targets``, in nats: [tokens]."""
    parts = []
    for begin in range(0, len(targets), ROWS):
        shifted, _, log_sum = log_softmax_parts(logits[begin : begin + ROWS])
        chosen = targets[begin : begin + ROWS]
        parts.append(log_sum - shifted[np.arange(len(chosen)), chosen].astype(np.float64))
    return np.concatenate(parts)
