"""A step's arrays for a TensorRT network, against loops that place one token at a time."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_step

from builder.targets.tensorrt import shapes
from builder.targets.tensorrt.options import NetworkOptions
from builder.targets.tensorrt.step_feeds import choose_mode, step_feeds
from plugins.inflight_batching.step import EngineLimits

LIMITS = EngineLimits(
    max_batch_size=8, max_num_tokens=2048, max_seq_len=1024, tokens_per_block=16, num_blocks=160, vocab_size=96
)

sequences = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=6)


def step_of(lengths, seed):
    """New and cached tokens of each sequence, over scattered blocks."""
    rng = np.random.default_rng(seed)
    blocks = iter(rng.permutation(LIMITS.num_blocks))
    tables = [np.array([next(blocks) for _ in range(-(-(new + past) // 16))]) for new, past in lengths]
    chunks = [(rng.integers(0, 96, new), past) for new, past in lengths]
    return make_step(chunks, tables, 16), tables


@settings(max_examples=60, deadline=None)
@given(sequences, st.integers(0, 100))
def test_tokens_reach_their_page_in_the_order_of_their_places(lengths, seed):
    if sum(-(-(new + past) // 16) for new, past in lengths) > LIMITS.num_blocks:
        return
    step, tables = step_of(lengths, seed)
    feeds = step_feeds(step, LIMITS, "mixed")
    pool = np.full((LIMITS.num_blocks, 16), -1)
    starts = feeds["page_update_starts"]
    for page in range(LIMITS.num_blocks):
        for count, index in enumerate(range(starts[page], starts[page + 1])):
            pool[page, feeds["page_write_offsets"][page] + count] = feeds["update_order"][index]
    token = 0
    for (new, past), table in zip(lengths, tables, strict=True):
        for place in range(past, past + new):
            assert pool[table[place // 16], place % 16] == token
            assert feeds["token_slots"][token] == table[place // 16] * 16 + place % 16
            token += 1
    assert (pool >= 0).sum() == token


@settings(max_examples=60, deadline=None)
@given(sequences, st.integers(0, 100))
def test_every_query_sees_the_blocks_of_its_own_sequence(lengths, seed):
    if sum(-(-(new + past) // 16) for new, past in lengths) > LIMITS.num_blocks:
        return
    step, tables = step_of(lengths, seed)
    mode = choose_mode(step)
    assert (mode == "decode") == all(new == 1 for new, _ in lengths)
    feeds = step_feeds(step, LIMITS, mode)
    rows, queries = feeds["query_gather"].shape
    assert rows <= shapes.max_rows(LIMITS)
    assert queries <= (1 if mode == "decode" else shapes.query_tile(LIMITS))
    token = 0
    for (new, _), table in zip(lengths, tables, strict=True):
        for _ in range(new):
            row, place = divmod(int(feeds["query_scatter"][token]), queries)
            assert feeds["query_gather"][row, place] == token
            assert feeds["block_tables"][row, : len(table)].tolist() == table.tolist()
            assert not feeds["block_tables"][row, len(table) :].any()
            token += 1
    # What pads a row is a token of its own sequence: it attends to keys that exist.
    owners = np.repeat(np.arange(len(lengths)), [new for new, _ in lengths])[feeds["query_gather"]]
    assert (owners == owners[:, :1]).all()


def test_a_long_prompt_does_not_pad_the_sequences_beside_it():
    step, _ = step_of([(700, 0), (1, 50), (1, 60)], seed=0)
    assert step_feeds(step, LIMITS, "mixed")["query_gather"].shape == (5, 256)


def test_feeds_are_int32_and_within_the_profiles_that_the_plan_was_built_for():
    step, _ = step_of([(3, 40), (1, 7)], seed=3)
    feeds = step_feeds(step, LIMITS, "mixed")
    assert {array.dtype for array in feeds.values()} == {np.dtype(np.int32)}
    options = NetworkOptions(max_batch_size=8, max_num_tokens=2048, max_seq_len=1024, tokens_per_block=16)
    assert shapes.max_rows(options) == shapes.max_rows(LIMITS)
    assert shapes.max_num_blocks(options, elements_per_token=64) >= LIMITS.num_blocks


def test_few_tokens_make_no_more_rows_than_sequences():
    assert shapes.max_rows(replace(LIMITS, max_num_tokens=4)) == 4
    assert shapes.max_rows(replace(LIMITS, max_num_tokens=256)) == 8
