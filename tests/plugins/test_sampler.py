"""Draws follow the distribution that was asked for, and belong to their request alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from plugins.generation import SamplingParams
from plugins.sampling import candidates
from plugins.sampling.logprobs import token_logprob
from plugins.sampling.sampler import NO_TOKEN, BatchSampler, sample_row
from plugins.sampling.uniforms import uniforms

logit_rows = npst.arrays(
    np.float32,
    st.integers(1, 700),
    elements=st.floats(-30, 30, width=32) | st.just(float("-inf")) | st.sampled_from([0.0, 1.0, 2.0]),
).filter(lambda row: bool(np.isfinite(row).any()))


def plain_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution [vocab] in float64 by sorting everything, as it is defined."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5, top_k=7),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=3.0, top_p=0.999),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.7),
    ],
)
def test_evenly_spread_draws_land_as_the_plain_distribution_says(params, vocab_size):
    logits = np.random.default_rng(vocab_size).normal(scale=2, size=vocab_size).astype(np.float32)
    num_draws = 4000
    tokens = [sample_row(logits, params, (number + 0.5) / num_draws) for number in range(num_draws)]
    share = np.bincount(tokens, minlength=vocab_size) / num_draws
    # An inverse transform gives each token an interval as long as its probability: no chance is involved here.
    assert np.abs(share - plain_distribution(logits, params)).max() < 1.5 / num_draws


def test_random_draws_pass_a_chi_square_test():
    logits = np.array([[2.0, 1.0, 0.0, -1.0, 1.5]], dtype=np.float32)
    params = SamplingParams(temperature=1.3)
    num_draws = 20_000
    sampler = BatchSampler(1)
    sampler.set_slot(0, params, seed=11)
    slots = np.zeros(num_draws, dtype=np.int64)
    tokens = sampler.sample(np.repeat(logits, num_draws, axis=0), slots, np.arange(num_draws)).token_ids
    expected = plain_distribution(logits[0], params) * num_draws
    chi_square = ((np.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # exceeded once in a thousand at 4 degrees of freedom


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.integers(1, 800))
def test_top_k_is_the_beginning_of_the_sorted_row(logits, k):
    expected = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))[:k]
    assert sorted(candidates.top_k(logits, k).tolist()) == sorted(expected.tolist())


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.floats(1e-6, 1, exclude_max=True))
def test_the_nucleus_is_the_smallest_heaviest_set(logits, top_p):
    weights = np.exp(logits - logits.max())
    total = float(weights.sum(dtype=np.float64))
    ids = candidates.nucleus(weights, total, top_p)
    share = weights[ids].astype(np.float64) / total
    assert len(set(ids.tolist())) == len(ids) >= 1
    assert share.sum() >= top_p - 1e-9
    assert share.sum() - share.min() < top_p + 1e-9
    outside = np.setdiff1d(np.arange(len(logits)), ids)
    lightest = weights[ids].min()
    assert (weights[outside] <= lightest).all()
    tied_outside, tied_inside = outside[weights[outside] == lightest], ids[weights[ids] == lightest]
    assert not len(tied_outside) or tied_inside.max() < tied_outside.min()


@settings(max_examples=100, deadline=None)
@given(logit_rows, st.floats(0, 1, exclude_max=True), st.floats(0.01, 100))
def test_top_k_of_one_and_a_tiny_top_p_are_greedy(logits, draw, temperature):
    greedy = int(logits.argmax())
    sampler = BatchSampler(2)
    sampler.set_slot(0, SamplingParams(temperature=temperature, top_k=1), seed=3)
    sampler.set_slot(1, SamplingParams(temperature=0), seed=3)
    tokens = sampler.sample(np.stack([logits, logits]), np.arange(2), np.zeros(2, dtype=np.int64)).token_ids
    assert tokens.tolist() == [greedy, greedy]
    token = sample_row(logits, SamplingParams(temperature=temperature, top_p=1e-9), draw)
    # A high temperature makes logits that nearly tie tie indeed; a token of the full weight is then as good.
    assert np.exp((logits[token] - logits[greedy]) / np.float32(temperature)) == 1


@settings(max_examples=150, deadline=None)
@given(
    logit_rows,
    st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
    st.floats(1e-4, 100),
    st.integers(0, 50),
    st.floats(1e-3, 1),
)
def test_a_masked_token_is_never_drawn(logits, draw, temperature, top_k, top_p):
    token = sample_row(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), draw)
    assert np.isfinite(logits[token])


def test_a_draw_depends_on_seed_and_position_and_not_on_the_batch():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 500)).astype(np.float32)
    kinds = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams(top_k=9)]
    sampler = BatchSampler(8)
    for slot in range(8):
        sampler.set_slot(slot, kinds[slot % 4], seed=slot % 4)
    positions = np.arange(6) * 7
    batch = sampler.sample(logits, np.arange(6), positions).token_ids
    for row in range(6):
        other_slot = row % 4 + 4
        alone = sampler.sample(logits[row : row + 1], np.array([other_slot]), positions[row : row + 1])
        assert alone.token_ids[0] == batch[row]


def test_uniform_numbers_are_uniform_along_positions_and_along_seeds():
    count = 100_000
    counters = np.arange(count)
    for numbers in (
        uniforms(np.full(count, 42, dtype=np.uint64), counters),
        uniforms(counters.astype(np.uint64), np.full(count, 17)),
        uniforms(np.full(count, 2**63 - 1, dtype=np.uint64), counters),
    ):
        assert ((numbers >= 0) & (numbers < 1)).all()
        cells = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert ((cells - count / 64) ** 2 / (count / 64)).sum() < 103.5  # once in a thousand at 63 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.012


def test_logprobs_are_of_the_raw_distribution_and_only_for_those_who_ask():
    logits = np.array([[1.0, 3.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]], dtype=np.float32)
    sampler = BatchSampler(2)
    sampler.set_slot(0, SamplingParams(temperature=0, logprobs=3), seed=0)
    sampler.set_slot(1, SamplingParams(temperature=0), seed=0)
    sampled = sampler.sample(logits, np.arange(2), np.zeros(2, dtype=np.int64))
    assert sampled.token_ids.tolist() == [1, 3]
    assert list(sampled.logprobs) == [0]
    log_softmax = logits[0] - np.log(np.exp(logits[0]).sum())
    assert sampled.logprobs[0].logprob == pytest.approx(log_softmax[1], abs=1e-6)
    assert [token for token, _ in sampled.logprobs[0].top] == [1, 3, 2]
    assert [logprob for _, logprob in sampled.logprobs[0].top] == pytest.approx(log_softmax[[1, 3, 2]], abs=1e-6)
    assert token_logprob(logits[1], 0, 0).top == ()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(logprobs=1)])
def test_logits_that_are_not_finite_give_no_token_and_leave_the_other_rows_alone(poison, params):
    logits = np.zeros((2, 10), dtype=np.float32)
    logits[0, 4] = poison
    logits[1, 2] = 50
    sampler = BatchSampler(2)
    for slot in range(2):
        sampler.set_slot(slot, params, seed=1)
    assert sampler.sample(logits, np.arange(2), np.zeros(2, dtype=np.int64)).token_ids.tolist() == [NO_TOKEN, 2]
