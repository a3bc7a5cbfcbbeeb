"""KL divergence of many changed models to the original, from their last hidden states, without whole logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quantize.calibration.runner import LayerRunner

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_BLOCK_VALUES = 2**22  # logits of a block of the vocabulary: 16 MB, of the original and of one copy at a time


def mean_divergence(
    runner: LayerRunner, original: Float32, read_copy: Callable[[int], Float32], num_copies: int
) -> Float64:
    """Mean over tokens of KL(original || copy) for each copy [num_tokens, hidden_size], in nats: [num_copies].

    The head passes once, in blocks of the vocabulary; sums of exponentials carry on from block to block.
    """
    totals = _LogSum(len(original))
    others = [_LogSum(len(original)) for _ in range(num_copies)]
    crosses = [np.zeros(len(original)) for _ in range(num_copies)]
    step = max(256, _BLOCK_VALUES // len(original))
    for begin in range(0, runner.vocab_size, step):
        end = min(begin + step, runner.vocab_size)
        logits = runner.logits(original, begin, end)
        exponentials, rescale = totals.add(logits)
        for index, (other, cross) in enumerate(zip(others, crosses, strict=True)):
            changed = runner.logits(read_copy(index), begin, end)
            other.add(changed)
            # KL(P || Q) = sum p (log p - log q): differences of logits are exactly 0 where the models agree.
            cross *= rescale
            cross += np.einsum("tv,tv->t", exponentials, logits - changed, dtype=np.float64)
    means = [
        np.mean(cross / totals.sums - totals.log() + other.log()) for cross, other in zip(crosses, others, strict=True)
    ]
    return np.maximum(np.array(means, np.float64), 0.0)  # below zero it can be by rounding alone


class _LogSum:
    """log(sum(exp(logits))) of each token, block by block."""

    def __init__(self, num_tokens: int) -> None:
        self._peaks = np.full(num_tokens, -np.inf, np.float32)
        self.sums: Float64 = np.zeros(num_tokens)  # relative to the peaks

    def add(self, logits: Float32) -> tuple[Float32, Float64]:
        """exp(logits - peak), and the factor by which all sums relative to the former peaks shrink: [num_tokens]."""
        peaks = np.maximum(self._peaks, logits.max(axis=1))
        rescale = np.exp((self._peaks - peaks).astype(np.float64))
        exponentials = np.exp(logits - peaks[:, None])
        self.sums = self.sums * rescale + exponentials.sum(axis=1, dtype=np.float64)
        self._peaks = peaks
        return exponentials, rescale

    def log(self) -> Float64:
        return np.asarray(self._peaks + np.log(self.sums), np.float64)
