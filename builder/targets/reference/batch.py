"""One step's inputs as torch tensors, with block tables turned into slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plugins.inflight_batching.step import StepInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    queries: slice  # its new tokens, among those of the step
    slots: Tensor  # int64 [past_len + new]: where its keys and values lie
    past_len: int


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # int64 [num_tokens]
    position_ids: Tensor  # int64 [num_tokens]
    logits_indices: Tensor  # int64 [num_logits]
    new_slots: Tensor  # int64 [num_tokens]
    sequences: list[Sequence]


def make_batch(inputs: StepInputs, tokens_per_block: int) -> Batch:
    """Raises IndexError where a sequence has fewer blocks than its tokens need."""
    import torch

    sequences = []
    for index, past_len in enumerate(inputs.past_lens.tolist()):
        start, end = inputs.query_starts[index : index + 2].tolist()
        blocks = inputs.block_indices[inputs.block_begins[index] : inputs.block_begins[index + 1]]
        slots = _slots(blocks, past_len + end - start, tokens_per_block)
        sequences.append(Sequence(slice(start, end), torch.from_numpy(slots), past_len))
    return Batch(
        input_ids=torch.from_numpy(np.array(inputs.input_ids, np.int64)),
        position_ids=torch.from_numpy(np.array(inputs.position_ids, np.int64)),
        logits_indices=torch.from_numpy(np.array(inputs.logits_indices, np.int64)),
        new_slots=torch.cat([sequence.slots[sequence.past_len :] for sequence in sequences]),
        sequences=sequences,
    )


def _slots(blocks: npt.NDArray[np.int32], num_tokens: int, tokens_per_block: int) -> npt.NDArray[np.int64]:
    positions = np.arange(num_tokens)
    slots: npt.NDArray[np.int64] = blocks[positions // tokens_per_block].astype(np.int64) * tokens_per_block
    return slots + positions % tokens_per_block
