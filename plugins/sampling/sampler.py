"""The batch sampler: logits of one step in, one token per sequence out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plugins.generation import SamplingParams, TokenLogprob
from plugins.sampling import candidates
from plugins.sampling.logprobs import token_logprob
from plugins.sampling.uniforms import uniforms

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

NO_TOKEN = -1
"""In place of a token id: the row has no finite maximum, so the engine computed nothing that can be sampled."""

_GREEDY_BELOW = 1e-5  # temperatures so low differ from greedy only by overflow in float32
_DRAW_GROUP = 256


@dataclass(frozen=True)
class SampledTokens:
    token_ids: IntArray  # [n], NO_TOKEN where the logits cannot be sampled
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by row, for the sequences that asked


class BatchSampler:
    """Samples the sequences of one step. Parameters are kept in arrays by slot, set when a sequence takes the slot.

    Every row is computed by itself: what a request draws depends on its logits, its seed and its position alone.
    Rows are visited one by one on purpose: at 32 thousand logits a row stays in the cache through all passes over it,
    a whole batch does not.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._greedy = np.ones(max_batch_size, dtype=np.bool_)
        self._plain = np.ones(max_batch_size, dtype=np.bool_)  # greedy and without log probabilities
        self._seeds = np.zeros(max_batch_size, dtype=np.uint64)
        self._params = [SamplingParams()] * max_batch_size

    def set_slot(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The sequence in ``slot`` is sampled so from now on; ``seed`` stands in for ``params.seed``."""
        self._greedy[slot] = params.temperature < _GREEDY_BELOW or params.top_k == 1
        self._plain[slot] = self._greedy[slot] and params.logprobs is None
        self._seeds[slot] = seed
        self._params[slot] = params

    def sample(self, logits: FloatArray, slots: IntArray, positions: IntArray) -> SampledTokens:
        """Choose one token for each row of ``logits`` [n, vocab]; ``slots`` [n] say whose they are.

        ``positions`` [n] number the chosen tokens in their sequences: with the seed they address the random number.
        """
        if self._plain[slots].all():
            return SampledTokens(_refuse_not_finite(logits, logits.argmax(axis=1)))
        greedy = self._greedy[slots].tolist()
        draws = uniforms(self._seeds[slots], positions).tolist()
        token_ids = np.empty(len(slots), dtype=np.int64)
        for row, (slot, draw) in enumerate(zip(slots.tolist(), draws, strict=True)):
            token_ids[row] = logits[row].argmax() if greedy[row] else sample_row(logits[row], self._params[slot], draw)
        _refuse_not_finite(logits, token_ids)
        return SampledTokens(token_ids, self._logprobs(logits, slots, token_ids))

    def _logprobs(self, logits: FloatArray, slots: IntArray, token_ids: IntArray) -> dict[int, TokenLogprob]:
        wanted = ((row, self._params[slot].logprobs) for row, slot in enumerate(slots.tolist()))
        return {
            row: token_logprob(logits[row], int(token_ids[row]), num_top)
            for row, num_top in wanted
            if num_top is not None and token_ids[row] != NO_TOKEN
        }


def sample_row(logits: FloatArray, params: SamplingParams, draw: float) -> int:
    """One token from ``logits`` [vocab] by inverse transform of ``draw`` in [0, 1): temperature, top-k, then top-p.

    Top-p looks at what top-k left, made to sum to one. Returns NO_TOKEN when there is no finite maximum.
    """
    highest = logits.max()
    if not np.isfinite(highest):
        return NO_TOKEN
    with np.errstate(over="ignore"):  # far below the maximum -inf is as good: the weight is 0 either way
        scaled = (logits - highest) / np.float32(params.temperature)
    if 0 < params.top_k < len(logits):
        ids = candidates.top_k(scaled, params.top_k)
        weights = np.exp(scaled[ids])
        return int(ids[_draw_nucleus(weights, params.top_p, draw)])
    return _draw_nucleus(np.exp(scaled, out=scaled), params.top_p, draw)


def _draw_nucleus(weights: FloatArray, top_p: float, draw: float) -> int:
    if top_p >= 1:
        return _draw(weights, draw)
    ids = candidates.nucleus(weights, float(weights.sum(dtype=np.float64)), top_p)
    return int(ids[_draw(weights[ids], draw)])


def _draw(weights: FloatArray, draw: float) -> int:
    """Index whose share of the running sum holds ``draw``. Two levels: sums of groups are ten times cheaper."""
    begins = np.arange(0, len(weights), _DRAW_GROUP)
    sums = np.cumsum(np.add.reduceat(weights, begins, dtype=np.float64))
    group = _find(sums, draw * sums[-1])
    before = sums[group - 1] if group else 0.0
    begin = group * _DRAW_GROUP
    within = np.cumsum(weights[begin : begin + _DRAW_GROUP], dtype=np.float64)
    return int(begin + _find(within, draw * sums[-1] - before))


def _find(sums: npt.NDArray[np.float64], target: float) -> int:
    """First index whose running sum exceeds ``target``; it has weight, for a weight of zero exceeds nothing."""
    index = int(np.searchsorted(sums, target, side="right"))
    # Rounding can put the target on or past the end: then the last index that has weight.
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1], side="left"))


def _refuse_not_finite(logits: FloatArray, token_ids: IntArray) -> IntArray:
    """Put NO_TOKEN where the chosen logit is not finite; argmax finds a NaN wherever it stands in the row."""
    chosen = logits[np.arange(len(token_ids)), token_ids]
    token_ids[~np.isfinite(chosen)] = NO_TOKEN
    return token_ids
