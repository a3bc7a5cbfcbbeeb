"""Who takes part in a step, who waits, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest

from plansmith_errors import RequestError
from plugins.generation import GenerationRequest, SamplingParams
from plugins.inflight_batching.detokenizer import IncrementalDetokenizer, TextStream
from plugins.inflight_batching.scheduler import Scheduler
from plugins.inflight_batching.sequence import Sequence, check_request
from plugins.inflight_batching.step import EngineLimits


def limits(**changes) -> EngineLimits:
    values = {
        "max_batch_size": 4,
        "max_num_tokens": 16,
        "max_seq_len": 64,
        "tokens_per_block": 4,
        "num_blocks": 32,
        "vocab_size": 257,
    }
    return EngineLimits(**(values | changes))


@pytest.fixture
def make_sequence(byte_tokenizer):
    def make(name: str, num_tokens: int) -> Sequence:
        request = GenerationRequest(name, range(num_tokens), SamplingParams(max_tokens=20))
        text = TextStream(IncrementalDetokenizer(byte_tokenizer, frozenset()), ())
        return Sequence(request, np.arange(num_tokens), 20, 0, text)

    return make


def run_step(scheduler: Scheduler):
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.advance(plan, np.full(len(plan.sampled), 7))
    for sequence in plan.sampled:
        sequence.output_ids.append(7)
    return plan


def test_decodes_go_first_and_prefill_takes_the_rest_in_chunks(make_sequence):
    scheduler = Scheduler(limits())
    scheduler.add(make_sequence("short", 3))
    run_step(scheduler)
    scheduler.add(make_sequence("long", 40))
    plan = run_step(scheduler)
    assert plan.num_new.tolist() == [1, 15]
    assert [sequence.request_id for sequence in plan.sampled] == ["short"]
    assert plan.inputs.input_ids.tolist() == [7, *range(15)]
    assert plan.inputs.position_ids.tolist() == [3, *range(15)]
    assert plan.inputs.query_starts.tolist() == [0, 1, 16]
    assert plan.inputs.past_lens.tolist() == [3, 0]
    assert plan.inputs.block_begins.tolist() == [0, 1, 5]
    assert plan.inputs.logits_indices.tolist() == [0]
    run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.num_new.tolist() == [1, 10]
    assert [sequence.request_id for sequence in plan.sampled] == ["short", "long"]
    assert plan.inputs.logits_indices.tolist() == [0, 10]


def test_requests_are_admitted_in_their_order_even_when_a_later_one_would_fit(make_sequence):
    scheduler = Scheduler(limits(num_blocks=8, max_num_tokens=64))
    for name, num_tokens in (("first", 20), ("large", 16), ("small", 2)):
        scheduler.add(make_sequence(name, num_tokens))
    run_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.running] == ["first"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["large", "small"]


def test_the_last_admitted_gives_way_and_is_the_first_to_return_with_its_outputs_as_prompt(make_sequence):
    scheduler = Scheduler(limits(num_blocks=4))
    first, second, third = make_sequence("first", 7), make_sequence("second", 7), make_sequence("third", 7)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)  # both hold two blocks of four tokens and need a third one
    assert scheduler.num_preemptions == 1
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second, third]
    assert second.tokens.tolist() == [*range(7), 7, 7]
    scheduler.remove(first)
    plan = run_step(scheduler)
    assert plan.admitted == [second]
    assert plan.inputs.input_ids.tolist() == second.tokens.tolist()[:9]


def test_no_more_sequences_run_than_can_decode_in_one_step(make_sequence):
    scheduler = Scheduler(limits(max_batch_size=8, max_num_tokens=2))
    for name in "abcd":
        scheduler.add(make_sequence(name, 1))
    for _ in range(3):
        assert len(run_step(scheduler).slots) == 2


def test_removing_everyone_leaves_the_pool_full_and_nothing_to_do(make_sequence):
    scheduler = Scheduler(limits())
    sequences = [make_sequence(str(number), 9) for number in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_step(scheduler)
    for sequence in sequences:
        scheduler.remove(sequence)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert not scheduler.has_work
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "message"),
    [
        ([], 5, "the prompt is empty: expected at least one token"),
        (range(64), 5, "the prompt has 64 tokens: this engine takes at most 63"),
        (range(30), 14, r"30 \+ 14 tokens: the KV cache holds 40 \(10 blocks of 4\)"),
        ([5, 257], 5, "token id 257: allowed are 0 to 256"),
        ([-1], 5, "token id -1"),
        ([1.5], 5, "not a list of token ids"),
        ([True], 5, "not a list of token ids"),
        ("text", 5, "not a list of token ids"),
        ([[1], [2, 3]], 5, "not a list of token ids"),
        ([2**70], 5, "not a list of token ids"),
        ([1], 0, "max_tokens is 0"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(prompt_ids, max_tokens, message):
    request = GenerationRequest("r", prompt_ids, SamplingParams(max_tokens=max_tokens))
    with pytest.raises(RequestError, match=message):
        check_request(request, limits(num_blocks=10))


def test_max_tokens_is_cut_to_what_the_sequence_length_leaves():
    request = GenerationRequest("r", np.arange(60, dtype=np.int32), SamplingParams(max_tokens=1000))
    prompt, max_tokens = check_request(request, limits())
    assert (prompt.dtype, len(prompt), max_tokens) == (np.int64, 60, 4)
