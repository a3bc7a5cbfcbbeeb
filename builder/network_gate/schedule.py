"""A schedule of in-flight batching for a check: prefill chunks and decodes mixed, sequences that end and others that
take their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plansmith_errors import BuildError

_LONGEST_WINDOW = 1024  # tokens; a longer sliding window is not reached: a check must end


@dataclass(frozen=True)
class Chunk:
    """New tokens ``ids`` [n] of one sequence, of which ``past`` are in the cache."""

    sequence: int
    past: int
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ScheduledStep:
    chunks: tuple[Chunk, ...]
    ended: tuple[int, ...] = ()  # sequences whose blocks are free after this step

    def __str__(self) -> str:
        prefills = [len(chunk.ids) for chunk in self.chunks if len(chunk.ids) > 1 or chunk.past == 0]
        parts = [f"prefill of {' + '.join(map(str, prefills))}"] if prefills else []
        decodes = len(self.chunks) - len(prefills)
        return " and ".join([*parts, *([f"{decodes} decoding"] if decodes else [])])


@dataclass(frozen=True)
class ScheduleLimits:
    """Of the engine that is checked, in sequences and tokens."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int
    sliding_windows: tuple[int | None, ...] = ()


@dataclass
class _Sequence:
    number: int
    arrival: int  # step
    prompt_len: int
    ids: npt.NDArray[np.int64]  # prompt, and what is decoded after it
    done: int = 0

    def take(self, room: int) -> Chunk:
        wanted = self.prompt_len - self.done if self.done < self.prompt_len else 1
        chunk = Chunk(self.number, self.done, self.ids[self.done : self.done + min(wanted, room)])
        self.done += len(chunk.ids)
        return chunk

    @property
    def is_decoding(self) -> bool:
        return self.done >= self.prompt_len


@dataclass
class _Running:
    waiting: list[_Sequence]
    running: list[_Sequence] = field(default_factory=list)


def make_schedule(limits: ScheduleLimits, token_ids: Sequence[int]) -> list[ScheduledStep]:
    """Five sequences over ``token_ids``, which are taken in turn and from the start again when they end.

    One is longer than the shortest sliding window (of up to 1024 tokens), one fills its block with its last prompt
    token, one has a single token. Raises BuildError where an engine is too small for any of it.
    """
    state = _Running(_sequences(limits, np.asarray(token_ids, np.int64)))
    steps: list[ScheduledStep] = []
    while state.waiting or state.running:
        _admit(state, len(steps), limits.max_batch_size)
        steps.append(_next_step(state, min(limits.max_num_tokens, limits.tokens_per_block + 7)))
    return steps


def num_blocks_needed(steps: Sequence[ScheduledStep], tokens_per_block: int) -> int:
    """Blocks that are in use at one time, at the most."""
    held: dict[int, int] = {}
    most = 0
    for step in steps:
        held |= {chunk.sequence: -(-(chunk.past + len(chunk.ids)) // tokens_per_block) for chunk in step.chunks}
        most = max(most, sum(held.values()))
        for sequence in step.ended:
            held.pop(sequence)
    return most


def _sequences(limits: ScheduleLimits, token_ids: npt.NDArray[np.int64]) -> list[_Sequence]:
    block = limits.tokens_per_block
    window = min((w for w in limits.sliding_windows if w is not None and w <= _LONGEST_WINDOW), default=0)
    # (arrival, prompt, decoded): in blocks, around their borders.
    wishes = [
        (0, max(2 * block + 3, window + 5), 12),
        (0, 5, 4),
        (1, block - 1, 8),
        (7, block + 1, 5),
        (9, 1, 6),
    ]
    sequences, start = [], 0
    for number, (arrival, prompt, decoded) in enumerate(wishes):
        prompt = min(prompt, limits.max_seq_len - decoded)
        if prompt < 1:
            raise BuildError(f"max_seq_len is {limits.max_seq_len}; a check of the network needs 16 or more")
        ids = np.take(token_ids, np.arange(start, start + prompt + decoded), mode="wrap")
        sequences.append(_Sequence(number, arrival, prompt, ids))
        start += len(ids)
    return sequences


def _admit(state: _Running, step: int, max_batch_size: int) -> None:
    for sequence in list(state.waiting):
        due = sequence.arrival <= step or not state.running
        if due and len(state.running) < max_batch_size:
            state.waiting.remove(sequence)
            state.running.append(sequence)


def _next_step(state: _Running, room: int) -> ScheduledStep:
    chunks = list(_chunks(state.running, room))
    ended = tuple(sequence.number for sequence in state.running if sequence.done == len(sequence.ids))
    state.running = [sequence for sequence in state.running if sequence.number not in ended]
    return ScheduledStep(tuple(chunks), ended)


def _chunks(running: Sequence[_Sequence], room: int) -> Iterator[Chunk]:
    # Decodes first, as a scheduler that must not starve them does.
    for sequence in sorted(running, key=lambda sequence: not sequence.is_decoding):
        if room:
            chunk = sequence.take(room)
            room -= len(chunk.ids)
            yield chunk
