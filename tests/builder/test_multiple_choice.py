"""Multiple-choice accuracy by lm-evaluation-harness's definition, worked out by hand and against transformers."""

import math

import numpy as np
import pytest
import torch
from scripted_engine import TableEngine
from tiny_models import random_ids, save_model

import builder
from builder import Question, multiple_choice
from builder.continuations import Continuation, score_continuations
from plansmith_errors import EngineError

LETTERS = "abcd ?"
PROBABILITIES = [0.5, 0.25, 0.0625, 0.0625, 0.0625, 0.0625]  # whatever comes before


def encode(text):
    return [LETTERS.index(letter) for letter in text]


def unigram_engine(**limits):
    return TableEngine(np.tile(np.log(PROBABILITIES), (len(LETTERS), 1)), **limits)


def test_acc_takes_the_likeliest_choice_and_acc_norm_the_likeliest_per_character():
    # " bb" has 1/16 * 1/4 * 1/4 = 2^-8, " aaaaa" 2^-4 * 2^-5 = 2^-9: acc prefers bb.
    # By character: 8/2 = 4 bits against 9/5 = 1.8 bits: acc_norm prefers aaaaa.
    first = Question("d?", ("bb", "aaaaa"), 0)
    second = Question("d?", ("bb", "aaaaa"), 1)
    third = Question("?", ("c", "a"), 1)  # a, by both
    found = multiple_choice(unigram_engine(), encode, [first, second, third])
    assert (found.acc, found.acc_norm, found.num_questions) == (pytest.approx(2 / 3), pytest.approx(2 / 3), 3)
    assert multiple_choice(unigram_engine(), encode, [first]).acc == 1
    assert multiple_choice(unigram_engine(), encode, [first]).acc_norm == 0
    assert multiple_choice(unigram_engine(), encode, [second, third]).acc_norm == 1
    assert found.acc_stderr == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))


def test_the_length_is_that_of_the_choice_without_the_space_before_it():
    # " bb" has 2^-8, " a" 2^-5. By character of the choice: 4 bits against 5. With the space: 8/3 against 5/2.
    assert multiple_choice(unigram_engine(), encode, [Question("d", ("a", "bb"), 1)]).acc_norm == 1


def test_short_sequences_share_a_step_and_long_ones_take_several():
    questions = [Question("d?", ("bb", "aaaaa"), 0)] * 5 + [Question("d" * 40, ("a" * 30, "b"), 0)]
    alone = unigram_engine(max_batch_size=1)
    together = unigram_engine(max_batch_size=4, max_num_tokens=16)
    few_blocks = unigram_engine(max_num_tokens=64, num_blocks=5)
    done = []
    expected = multiple_choice(alone, encode, questions)
    assert multiple_choice(together, encode, questions, lambda *state: done.append(state[:2])) == expected
    assert multiple_choice(few_blocks, encode, questions) == expected
    assert set(alone.sequences_of_steps) == {1} and len(together.sequences_of_steps) < len(alone.sequences_of_steps) + 4
    assert max(together.sequences_of_steps) > 1
    assert done[-1] == (12, 12)


def test_likelihoods_are_those_of_transformers_in_any_batch(tmp_path):
    model = save_model(tmp_path, "llama")
    rng = np.random.default_rng(3)
    ids = random_ids(num_seqs=9, num_tokens=90)
    continuations = [
        Continuation(row[: int(length)], int(rng.integers(1, length)), "")
        for row, length in zip(ids, rng.integers(2, 91, len(ids)), strict=True)
    ]
    expected = []
    for item in continuations:
        with torch.inference_mode():
            logprobs = model(torch.from_numpy(item.ids)[None]).logits[0].double().log_softmax(-1)
        predicted = logprobs[item.num_context - 1 : -1]
        expected.append(float(predicted.gather(-1, torch.from_numpy(item.ids[item.num_context :])[:, None]).sum()))
    for max_num_tokens, max_batch_size in ((512, 32), (40, 32), (7, 2)):
        options = builder.BuildOptions(max_num_tokens=max_num_tokens, max_batch_size=max_batch_size)
        engine = builder.load_reference(tmp_path, options, num_blocks=4)
        assert score_continuations(engine, continuations) == pytest.approx(expected, abs=1e-3)


def test_what_cannot_be_scored_is_refused():
    engine = unigram_engine()
    with pytest.raises(EngineError, match="no question"):
        multiple_choice(engine, encode, [])
    with pytest.raises(EngineError, match=r"question 2, choice 1 has 204 tokens; this engine takes 129"):
        multiple_choice(engine, encode, [Question("d", ("a", "b"), 0), Question("d", ("a" * 202, "b"), 0)])
    with pytest.raises(EngineError, match=r"question 1, choice 1 has 0 of 2 tokens as its context"):
        multiple_choice(engine, encode, [Question("", ("a", "b"), 0)])
    with pytest.raises(EngineError, match="token id 7"):
        multiple_choice(engine, lambda text: [7] * len(text), [Question("d", ("a", "b"), 0)])
