"""Log likelihood of continuations, several short sequences in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.log_softmax import ROWS, log_softmax_parts
from builder.windows import check_vocabulary, chunk_size, longest_sequence
from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepEngine, StepInputs


@dataclass(frozen=True)
class Continuation:
    """``ids[num_context:]`` are scored, each given all tokens before it."""

    ids: npt.NDArray[np.int64]  # [tokens]
    num_context: int  # 1 or more
    name: str  # for errors: "question 3, choice 1"


@dataclass(frozen=True)
class _Part:
    """The tokens ``start:end`` of one sequence, in one step."""

    sequence: int
    start: int
    end: int


def score_continuations(
    engine: StepEngine, continuations: Sequence[Continuation], progress: Callable[[int], None] | None = None
) -> list[float]:
    """The sum of log probabilities of each continuation, in nats; ``progress`` is told how many are done.

    The engine's blocks from 0 on are overwritten, so it must serve nobody else. Raises EngineError when a sequence is
    too long for the engine or has tokens outside its vocabulary.
    """
    for continuation in continuations:
        _check(continuation, engine.limits)
    scores = [0.0] * len(continuations)
    for parts in _steps([len(c.ids) - 1 for c in continuations], engine):
        logits = engine.step(_step_inputs(parts, continuations, engine.limits.tokens_per_block))
        row = 0
        for part in parts:
            targets = _targets(part, continuations[part.sequence])
            scores[part.sequence] += _log_likelihood(logits[row : row + len(targets)], targets)
            row += len(targets)
        if progress is not None:
            progress(parts[-1].sequence + 1)
    return scores


def _check(continuation: Continuation, limits: EngineLimits) -> None:
    length = len(continuation.ids)
    if not 1 <= continuation.num_context < length:
        raise EngineError(
            f"{continuation.name} has {continuation.num_context} of {length} tokens as its context; "
            "expected one token of context or more and one to score"
        )
    if length - 1 > longest_sequence(limits):
        raise EngineError(
            f"{continuation.name} has {length} tokens; this engine takes {longest_sequence(limits) + 1}, "
            "build it with a larger max_seq_len"
        )
    check_vocabulary(continuation.ids, limits)


def _steps(lengths: Sequence[int], engine: StepEngine) -> Iterator[list[_Part]]:
    """Whole sequences together while they fit a step; one that is longer than a step by itself, in several."""
    limits, chunk = engine.limits, chunk_size(engine)
    parts: list[_Part] = []
    tokens = blocks = 0
    for sequence, length in enumerate(lengths):
        needed = -(-length // limits.tokens_per_block)
        full = tokens + length > chunk or blocks + needed > limits.num_blocks or len(parts) == limits.max_batch_size
        if parts and full:
            yield parts
            parts, tokens, blocks = [], 0, 0
        if length > chunk:
            for start in range(0, length, chunk):
                yield [_Part(sequence, start, min(start + chunk, length))]
            continue
        parts.append(_Part(sequence, 0, length))
        tokens, blocks = tokens + length, blocks + needed
    if parts:
        yield parts


def _step_inputs(parts: Sequence[_Part], continuations: Sequence[Continuation], tokens_per_block: int) -> StepInputs:
    """Sequences in blocks 0, 1, 2 ... one after the other; logits of the tokens that predict a scored one."""
    starts = np.cumsum([0, *(part.end - part.start for part in parts)]).astype(np.int32)
    blocks = np.cumsum([0, *(-(-part.end // tokens_per_block) for part in parts)]).astype(np.int32)
    wanted = [
        np.arange(part.end - part.start - len(_targets(part, continuations[part.sequence])), part.end - part.start)
        + start
        for part, start in zip(parts, starts.tolist(), strict=False)
    ]
    return StepInputs(
        input_ids=np.concatenate([continuations[part.sequence].ids[part.start : part.end] for part in parts]),
        position_ids=np.concatenate([np.arange(part.start, part.end, dtype=np.int64) for part in parts]),
        query_starts=starts,
        past_lens=np.array([part.start for part in parts], np.int32),
        block_indices=np.arange(blocks[-1], dtype=np.int32),
        block_begins=blocks,
        logits_indices=np.concatenate(wanted).astype(np.int64),
    )


def _targets(part: _Part, continuation: Continuation) -> npt.NDArray[np.int64]:
    """The scored tokens that this part's logits predict; its last ones, because a continuation is an end."""
    return continuation.ids[max(part.start + 1, continuation.num_context) : part.end + 1]


def _log_likelihood(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> float:
    total = 0.0
    for begin in range(0, len(targets), ROWS):
        shifted, _, log_sum = log_softmax_parts(logits[begin : begin + ROWS])
        chosen = targets[begin : begin + ROWS]
        total += float((shifted[np.arange(len(chosen)), chosen] - log_sum).sum())
    return total
