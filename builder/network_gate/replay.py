"""Run a schedule on an engine, over blocks that lie scattered and are used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from builder.network_gate.schedule import Chunk, ScheduledStep
from plugins.inflight_batching.step import StepEngine, StepInputs


class ScatteredBlocks:
    """Which blocks each sequence has; a free one is chosen at random, one that was used before where there is any."""

    def __init__(self, num_blocks: int, tokens_per_block: int, seed: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._rng = np.random.default_rng(seed)
        self._fresh = self._rng.permutation(num_blocks).tolist()
        self._used: list[int] = []
        self._tables: dict[int, list[int]] = {}

    def table(self, sequence: int, num_tokens: int) -> list[int]:
        """The blocks of ``sequence``, as many as ``num_tokens`` need."""
        blocks = self._tables.setdefault(sequence, [])
        while len(blocks) * self._tokens_per_block < num_tokens:
            blocks.append((self._used or self._fresh).pop())
        return blocks

    def free(self, sequence: int) -> None:
        self._used += self._tables.pop(sequence)
        self._rng.shuffle(self._used)


def replay(
    engine: StepEngine, steps: Sequence[ScheduledStep], seed: int = 0
) -> Iterator[tuple[StepInputs, npt.NDArray[np.float32]]]:
    """Yield each step's inputs and the logits [num_tokens, vocab_size] of all its tokens.

    Logits are the engine's own buffer: valid until its next step.
    """
    limits = engine.limits
    blocks = ScatteredBlocks(limits.num_blocks, limits.tokens_per_block, seed)
    for step in steps:
        inputs = _step_inputs(step.chunks, blocks)
        yield inputs, engine.step(inputs)
        for sequence in step.ended:
            blocks.free(sequence)


def _step_inputs(chunks: Sequence[Chunk], blocks: ScatteredBlocks) -> StepInputs:
    tables = [blocks.table(chunk.sequence, chunk.past + len(chunk.ids)) for chunk in chunks]
    lengths = [len(chunk.ids) for chunk in chunks]
    return StepInputs(
        input_ids=np.concatenate([chunk.ids for chunk in chunks]),
        position_ids=np.concatenate([np.arange(chunk.past, chunk.past + len(chunk.ids)) for chunk in chunks]),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        past_lens=np.array([chunk.past for chunk in chunks], np.int32),
        block_indices=np.concatenate(tables).astype(np.int32),
        block_begins=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        logits_indices=np.arange(sum(lengths), dtype=np.int64),
    )
