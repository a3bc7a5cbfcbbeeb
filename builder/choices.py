"""Multiple-choice accuracy by log likelihood, as lm-evaluation-harness defines acc and acc_norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from builder.continuations import Continuation, score_continuations
from plansmith_errors import EngineError
from plugins.inflight_batching.step import StepEngine

Encode = Callable[[str], Sequence[int]]
"""A text to token ids, without special tokens."""


@dataclass(frozen=True)
class Question:
    context: str  # ends without a space
    choices: tuple[str, ...]  # begin without one; a space is put between
    answer: int  # index of the right choice


@dataclass(frozen=True)
class MultipleChoice:
    acc: float  # share of questions whose likeliest choice is right
    acc_norm: float  # the same, with log likelihoods divided by the length of the choice in characters
    num_questions: int

    @property
    def acc_stderr(self) -> float:
        """Standard error of ``acc`` as a sample mean; 0 for one question."""
        return math.sqrt(self.acc * (1 - self.acc) / max(self.num_questions - 1, 1))


def multiple_choice(
    engine: StepEngine,
    encode: Encode,
    questions: Sequence[Question],
    progress: Callable[[int, int, str], None] | None = None,
) -> MultipleChoice:
    """Score every choice as a continuation of its context; of equally likely choices the first counts.

    Raises EngineError when there is no question, or one does not fit the engine.
    """
    if not questions:
        raise EngineError("there is no question to score; give one or more")
    continuations = [
        _encode_choice(encode, question.context, choice, f"question {number}, choice {index}")
        for number, question in enumerate(questions, 1)
        for index, choice in enumerate(question.choices, 1)
    ]
    total = len(continuations)
    scores = score_continuations(
        engine, continuations, None if progress is None else lambda done: progress(done, total, "answers")
    )
    hits = norm_hits = begin = 0
    for question in questions:
        lengths = np.array([len(choice) for choice in question.choices])
        likelihoods = np.array(scores[begin : begin + len(lengths)])
        begin += len(lengths)
        hits += int(likelihoods.argmax() == question.answer)
        norm_hits += int((likelihoods / lengths).argmax() == question.answer)
    return MultipleChoice(hits / len(questions), norm_hits / len(questions), len(questions))


def _encode_choice(encode: Encode, context: str, choice: str, name: str) -> Continuation:
    """Tokens of both together, split where the context's own tokens end.

    lm-evaluation-harness does the same: a token that spans the border counts to the context.
    """
    whole = np.asarray(encode(f"{context} {choice}"), np.int64)
    return Continuation(whole, len(encode(context)), name)
