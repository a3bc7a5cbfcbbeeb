"""An engine whose logits are a function of the current token alone, so that results can be worked out by hand."""

from __future__ import annotations

import numpy as np

from plugins.inflight_batching.step import EngineLimits, StepInputs


class TableEngine:
    """``table`` [vocab, vocab]: row t holds the logits that follow token t. Remembers the sizes of its steps."""

    def __init__(
        self, table: np.ndarray, *, max_num_tokens: int = 64, max_batch_size: int = 8, num_blocks: int = 16
    ) -> None:
        self._table = np.asarray(table, np.float32)
        self._limits = EngineLimits(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=128,
            tokens_per_block=16,
            num_blocks=num_blocks,
            vocab_size=self._table.shape[1],
        )
        self._buffer = np.empty((max_num_tokens, self._table.shape[1]), np.float32)
        self.sequences_of_steps: list[int] = []

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> np.ndarray:
        assert len(inputs.input_ids) <= self._limits.max_num_tokens
        assert len(inputs.past_lens) <= self._limits.max_batch_size
        assert inputs.block_indices.max() < self._limits.num_blocks
        self.sequences_of_steps.append(len(inputs.past_lens))
        self._buffer[:] = np.nan  # what an earlier step returned is valid no longer
        logits = self._buffer[: len(inputs.logits_indices)]
        logits[:] = self._table[inputs.input_ids[inputs.logits_indices]]
        return logits

    def close(self) -> None:
        return
