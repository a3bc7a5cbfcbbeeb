"""Ranks in lock-step: what they exchange, and that the failure of one is everyone's, at once and by its own name."""

import threading

import numpy as np
import pytest

from builder.sharding.lockstep import LockstepError, all_reduce, run_lockstep


def test_every_rank_gets_what_all_gave_in_their_order():
    found = run_lockstep([4, 5, 6], lambda rank, exchange: [exchange(rank), exchange(10 * rank)])
    assert found == [[[4, 5, 6], [40, 50, 60]]] * 3


def test_sums_have_the_same_bits_on_each_rank():
    parts = np.random.default_rng(0).normal(size=(7, 1000)).astype(np.float32)
    sums = run_lockstep(range(7), lambda rank, exchange: all_reduce(exchange, parts[rank]))
    assert all(np.array_equal(one, sums[0]) for one in sums)
    np.testing.assert_allclose(sums[0], parts.astype(np.float64).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_ends_all_with_its_error(failing):
    def work(rank, exchange):
        exchange(rank)
        if rank == failing:
            raise ValueError(f"rank {rank}: no memory")
        return exchange(rank)

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"rank {failing}: no memory"):
        run_lockstep(range(4), work)
    assert threading.active_count() == before


def test_ranks_that_disagree_about_how_often_they_meet_do_not_wait_for_ever():
    with pytest.raises(LockstepError):
        run_lockstep(range(3), lambda rank, exchange: [exchange(0) for _ in range(1 + (rank == 1))])


def test_one_rank_meets_nobody():
    assert run_lockstep([3], lambda rank, exchange: all_reduce(exchange, rank)) == [3]
