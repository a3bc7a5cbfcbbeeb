"""Step engines for tests: small, deterministic, and honest about the block tables they are given."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

_PRIME = np.uint64(0x100000001B3)


class HashEngine:
    """The next token is a hash of the whole history, read back through the block tables.

    Tokens are stored in a "cache" [num_blocks, tokens_per_block] as an attention kernel stores keys: a wrong block, a
    wrong past length or a block that two sequences write to gives wrong tokens.
    """

    def __init__(
        self, limits: EngineLimits, *, fails_at_step: int | None = None, starts: threading.Event | None = None
    ) -> None:
        self._limits = limits
        self._cache = np.full((limits.num_blocks, limits.tokens_per_block), -1, dtype=np.int64)
        self._fails_at_step = fails_at_step
        self._starts = starts  # the first step waits for it
        self.num_steps = 0
        self.largest_step = 0
        self.closed = False

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        self.num_steps += 1
        if self._starts is not None:
            assert self._starts.wait(60)
        if self.num_steps == self._fails_at_step:
            raise EngineError("the device is gone:\nout of memory")
        self._check(inputs)
        histories = [self._write_and_read(inputs, row) for row in range(len(inputs.past_lens))]
        ends = inputs.query_starts[1:].tolist()
        logits = np.empty((len(inputs.logits_indices), self._limits.vocab_size), dtype=np.float32)
        for row, index in enumerate(inputs.logits_indices.tolist()):
            sequence = int(np.searchsorted(inputs.query_starts, index, side="right")) - 1
            assert index == ends[sequence] - 1
            logits[row] = hashed_logits(histories[sequence], self._limits.vocab_size)
        return logits

    def close(self) -> None:
        self.closed = True

    def _check(self, inputs: StepInputs) -> None:
        limits = self._limits
        self.largest_step = max(self.largest_step, len(inputs.input_ids))
        assert 1 <= len(inputs.input_ids) <= limits.max_num_tokens
        assert 1 <= len(inputs.past_lens) <= limits.max_batch_size
        assert inputs.query_starts[-1] == len(inputs.input_ids) == len(inputs.position_ids)
        assert inputs.block_begins[-1] == len(inputs.block_indices)
        assert len(set(inputs.block_indices.tolist())) == len(inputs.block_indices), "a block belongs to two sequences"
        assert inputs.input_ids.dtype == inputs.position_ids.dtype == inputs.logits_indices.dtype == np.int64
        for array in (inputs.query_starts, inputs.past_lens, inputs.block_indices, inputs.block_begins):
            assert array.dtype == np.int32

    def _write_and_read(self, inputs: StepInputs, row: int) -> npt.NDArray[np.int64]:
        blocks = inputs.block_indices[inputs.block_begins[row] : inputs.block_begins[row + 1]]
        new = inputs.input_ids[inputs.query_starts[row] : inputs.query_starts[row + 1]]
        past = int(inputs.past_lens[row])
        positions = np.arange(past, past + len(new))
        assert (
            inputs.position_ids[inputs.query_starts[row] : inputs.query_starts[row + 1]].tolist() == positions.tolist()
        )
        size = self._limits.tokens_per_block
        assert len(blocks) == -(-(past + len(new)) // size)
        self._cache[blocks[positions // size], positions % size] = new
        return self._cache[blocks].ravel()[: past + len(new)]


def hashed_logits(history: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """Logits [vocab_size], spread over a few units, that depend on every token of ``history`` and its place."""
    with np.errstate(over="ignore"):
        places = np.arange(1, len(history) + 1, dtype=np.uint64) * _PRIME
        state = np.bitwise_xor.reduce((history.astype(np.uint64) + places) * (places ^ (places >> np.uint64(7))))
        mixed = (np.arange(vocab_size, dtype=np.uint64) + state) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)).astype(np.float64) * 2.0**-24 * 6).astype(np.float32)


class ConstantEngine:
    """Returns the same logits for every token, at once: what is left of a step is the time of our own Python."""

    def __init__(self, limits: EngineLimits, logits: npt.NDArray[np.float32]) -> None:
        self._limits = limits
        self._logits = np.tile(logits, (limits.max_batch_size, 1))

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        return self._logits[: len(inputs.logits_indices)]

    def close(self) -> None:
        return
