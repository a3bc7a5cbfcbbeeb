"""A rank's place among the others: which layers it has, with whom it sums, which experts are its own."""

from hypothesis import given
from hypothesis import strategies as st

from builder.parallel import Parallelism, Rank

SIZES = st.sampled_from([1, 2, 4, 8])


@given(tp_size=SIZES, pp_size=SIZES, num_layers=st.integers(8, 100))
def test_every_layer_is_on_one_stage_and_stages_differ_by_one_layer_at_most(tp_size, pp_size, num_layers):
    ranks = Parallelism(tp_size, pp_size).ranks()
    stages = [rank.layers(num_layers) for rank in ranks[::tp_size]]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert all(
        ranks[member].layers(num_layers) == rank.layers(num_layers) for rank in ranks for member in rank.tp_group
    )


@given(moe_tp_size=SIZES, ep_size=SIZES, share=st.integers(1, 4))
def test_every_part_of_every_expert_is_on_exactly_one_rank_of_the_group(moe_tp_size, ep_size, share):
    parallelism = Parallelism(tp_size=moe_tp_size * ep_size, ep_size=ep_size)
    assert parallelism.moe_tp_size == moe_tp_size
    parts = [(expert, rank.moe_tp_rank) for rank in parallelism.ranks() for expert in rank.experts(share * ep_size)]
    assert sorted(parts) == [(expert, part) for expert in range(share * ep_size) for part in range(moe_tp_size)]


def test_neighbours_are_one_tensor_parallel_group():
    rank = Rank(Parallelism(tp_size=4, pp_size=2), 6)
    assert (rank.tp_rank, rank.pp_rank, rank.tp_group) == (2, 1, (4, 5, 6, 7))
    assert not rank.is_first_stage
    assert rank.is_last_stage
