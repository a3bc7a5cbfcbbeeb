"""Perplexity of a text, through any engine's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plansmith_errors import EngineError
from plugins.inflight_batching.step import StepEngine, StepInputs


@dataclass(frozen=True)
class Perplexity:
    nll_per_token: float  # mean negative log likelihood, in nats
    perplexity: float  # exp(nll_per_token)
    num_scored: int  # tokens


def perplexity(engine: StepEngine, token_ids: Sequence[int], *, window: int = 512, max_windows: int = 8) -> Perplexity:
    """Score ``token_ids`` in non-overlapping windows of ``window`` tokens; in each, all but the first token count.

    A last, shorter window is left out unless it is the only one. The engine's blocks from 0 on are overwritten, so it
    must serve nobody else. Raises EngineError when a window does not fit the engine or there is nothing to score.
    """
    limits = engine.limits
    longest = min(limits.max_seq_len, limits.num_blocks * limits.tokens_per_block)
    if not 2 <= window <= longest:
        raise EngineError(f"perplexity window is {window} tokens; this engine takes 2 to {longest}")
    ids = np.asarray(token_ids, np.int64)
    starts = list(range(0, len(ids) - window + 1, window))[:max_windows] or [0]
    total, scored = 0.0, 0
    for start in starts:
        nll = _window_nll(engine, ids[start : start + window])
        total, scored = total + float(nll.sum()), scored + len(nll)
    if not scored:
        raise EngineError(f"perplexity needs a text of 2 tokens or more; found {len(ids)}")
    return Perplexity(total / scored, math.exp(total / scored), scored)


def _window_nll(engine: StepEngine, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Negative log likelihood of ``ids[1:]``, in nats."""
    parts = []
    for start in range(0, len(ids) - 1, engine.limits.max_num_tokens):
        end = min(start + engine.limits.max_num_tokens, len(ids) - 1)
        logits = engine.step(_prefill(engine, ids, start, end))
        parts.append(_nll(logits, ids[start + 1 : end + 1]))
    return np.concatenate(parts) if parts else np.zeros(0)


def _prefill(engine: StepEngine, ids: npt.NDArray[np.int64], start: int, end: int) -> StepInputs:
    """A chunk of one sequence that lies in blocks 0, 1, 2 ...; logits of every token."""
    blocks = -(-end // engine.limits.tokens_per_block)
    return StepInputs(
        input_ids=np.ascontiguousarray(ids[start:end]),
        position_ids=np.arange(start, end, dtype=np.int64),
        query_starts=np.array([0, end - start], np.int32),
        past_lens=np.array([start], np.int32),
        block_indices=np.arange(blocks, dtype=np.int32),
        block_begins=np.array([0, blocks], np.int32),
        logits_indices=np.arange(end - start, dtype=np.int64),
    )


def _nll(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    peak = logits.max(axis=-1)
    shifted = logits - peak[:, None]
    log_sum = np.log(np.exp(shifted).sum(axis=-1, dtype=np.float64))
    chosen = shifted[np.arange(len(targets)), targets].astype(np.float64)
    result: npt.NDArray[np.float64] = log_sum - chosen
    return result
