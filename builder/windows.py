"""A text through an engine: windows of tokens, each a prompt of its own, and the logits of every token in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepEngine, StepInputs

MAX_CHUNK = 512  # tokens whose logits exist at one time: 512 x 152K floats are 0.3 GB


def split_windows(token_ids: Sequence[int], window: int, max_windows: int) -> list[npt.NDArray[np.int64]]:
    """Non-overlapping windows of ``window`` tokens; a last, shorter one is left out unless it is the only one."""
    ids = np.asarray(token_ids, np.int64)
    starts = list(range(0, len(ids) - window + 1, window))[:max_windows] or [0]
    return [ids[start : start + window] for start in starts]


def check_windows(windows: Sequence[npt.NDArray[np.int64]], window: int, *engines: StepEngine) -> None:
    """Raises EngineError when a window does not fit an engine, or a token is outside its vocabulary."""
    longest = min(longest_sequence(engine.limits) for engine in engines)
    if not 2 <= window <= longest:
        raise EngineError(f"perplexity window is {window} tokens; this engine takes 2 to {longest}")
    for ids in windows:
        for engine in engines:
            check_vocabulary(ids, engine.limits)


def check_vocabulary(ids: npt.NDArray[np.int64], limits: EngineLimits) -> None:
    """Raises EngineError: an embedding would be read outside its rows."""
    highest, lowest = ids.max(initial=0), ids.min(initial=0)
    if lowest < 0 or highest >= limits.vocab_size:
        raise EngineError(
            f"the text has the token id {highest if lowest >= 0 else lowest}; the engine's vocabulary is 0 to "
            f"{limits.vocab_size - 1}: give the tokenizer of this very model"
        )


def longest_sequence(limits: EngineLimits) -> int:
    """Tokens of the longest sequence that the engine can hold."""
    return min(limits.max_seq_len, limits.num_blocks * limits.tokens_per_block)


def chunk_size(*engines: StepEngine) -> int:
    """Tokens of a step that all of these engines take, and whose logits are kept in bounds."""
    return min(MAX_CHUNK, *(engine.limits.max_num_tokens for engine in engines))


def prefill_logits(
    engine: StepEngine, ids: npt.NDArray[np.int64], chunk: int
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (position, logits [tokens, vocab_size]) for all of ``ids``, ``chunk`` tokens at a time.

    The sequence takes the engine's blocks from 0 on, so the engine must serve nobody else. Logits are the engine's own
    buffer: valid until its next step.
    """
    for start in range(0, len(ids), chunk):
        yield start, engine.step(_prefill_step(engine, ids, start, min(start + chunk, len(ids))))


def _prefill_step(engine: StepEngine, ids: npt.NDArray[np.int64], start: int, end: int) -> StepInputs:
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
