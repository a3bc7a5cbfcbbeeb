"""The step contract: what every compiled engine computes, and all that the scheduler knows of it.

A step is a ragged batch of new tokens of several sequences, prefill chunks and decodes mixed, over a paged KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class EngineLimits:
    """What an engine was compiled for. The names are trtllm-build's."""

    max_batch_size: int  # sequences in one step
    max_num_tokens: int  # new tokens in one step
    max_seq_len: int  # prompt and continuation of one sequence, in tokens
    tokens_per_block: int
    num_blocks: int  # physical KV blocks that the loaded engine owns
    vocab_size: int


@dataclass(frozen=True)
class StepInputs:
    """One step. Tokens of one sequence are contiguous; sequences keep one order through all arrays."""

    input_ids: npt.NDArray[np.int64]  # [num_tokens]
    position_ids: npt.NDArray[np.int64]  # [num_tokens]
    query_starts: npt.NDArray[np.int32]  # [num_seqs + 1]: where each sequence's new tokens begin
    past_lens: npt.NDArray[np.int32]  # [num_seqs]: tokens already in the cache
    block_indices: npt.NDArray[np.int32]  # [sum of blocks]: physical block numbers, sequence after sequence
    block_begins: npt.NDArray[np.int32]  # [num_seqs + 1]: where each sequence's blocks begin in block_indices
    logits_indices: npt.NDArray[np.int64]  # [num_logits]: rows of input_ids whose logits are wanted


class StepEngine(Protocol):
    """A loaded engine. It is driven by one thread."""

    @property
    def limits(self) -> EngineLimits: ...

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run one step; return logits [num_logits, vocab_size] in float32, valid until the next call.

        The keys and values of the new tokens are written to the blocks named in ``block_indices``.
        Raises EngineError when the engine cannot go on.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory. Safe to call twice."""
        ...
