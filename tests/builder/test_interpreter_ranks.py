"""Networks of several ranks in lockstep: sums, gathers, hand-overs, and what happens when one fails."""

import json

import numpy as np
import pytest
from trt_networks import Net, trt

from builder.network.interpreter import Meetings, run_lockstep
from builder.parallel import Parallelism
from plansmith_errors import BuildError

RNG = np.random.default_rng(4)
FLOAT, HALF = trt.float32, trt.float16
OPERATIONS, REDUCTIONS = trt.CollectiveOperation, trt.ReduceOperation


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def collective(net, tensor, operation, reduction, ranks, name="o_proj:all_reduce", **metadata):
    layer = net.network.add_dist_collective(
        tensor, getattr(OPERATIONS, operation), getattr(REDUCTIONS, reduction), -1, None
    )
    layer.num_ranks, layer.name = ranks, name
    layer.metadata = json.dumps({"op": operation, "reduce": reduction, **metadata})
    return layer


def rank_network(operation="ALL_REDUCE", ranks=2, dtype=FLOAT, **metadata):
    net = Net()
    reduction = "SUM" if "REDUCE" in operation else "NONE"
    net.output(collective(net, net.input("x", dtype, (-1, 4)), operation, reduction, ranks, **metadata))
    return net


def run(nets, feeds, parallelism):
    meetings = Meetings(parallelism)
    ranks = [net.interpreter(meetings.collective(rank)) for rank, net in enumerate(nets)]
    return run_lockstep(meetings, lambda rank, handed_on: ranks[rank].run({**feeds[rank], **handed_on}))


def test_all_ranks_get_the_same_sum_rounded_once():
    parts = [normal(3, 4, dtype=np.float16) for _ in range(4)]
    nets = [rank_network(ranks=4, dtype=HALF, group=[0, 1, 2, 3]) for _ in parts]
    outputs = run(nets, [{"x": part} for part in parts], Parallelism(tp_size=4))
    expected = sum(part.astype(np.float32) for part in parts).astype(np.float16)
    assert all(np.array_equal(output["y"], expected) for output in outputs)


def test_gather_and_scatter_follow_the_order_of_the_group():
    parts = [normal(2, 4), normal(2, 4)]
    feeds = [{"x": part} for part in parts]
    for output in run([rank_network("ALL_GATHER") for _ in parts], feeds, Parallelism(tp_size=2)):
        assert np.array_equal(output["y"], np.concatenate(parts))
    outputs = run([rank_network("REDUCE_SCATTER") for _ in parts], feeds, Parallelism(tp_size=2))
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(output["y"], (parts[0] + parts[1])[index : index + 1])


def test_groups_within_a_stage_meet_by_themselves():
    parts = [normal(1, 4) for _ in range(4)]
    nets = [rank_network(group=[0, 1] if rank < 2 else [2, 3]) for rank in range(4)]
    outputs = run(nets, [{"x": part} for part in parts], Parallelism(tp_size=4))
    for rank, output in enumerate(outputs):
        first = rank // 2 * 2
        np.testing.assert_allclose(output["y"], parts[first] + parts[first + 1])


def test_a_stage_hands_its_hidden_states_to_the_next():
    nets = []
    for stage in range(2):
        for _ in range(2):
            net = Net()
            x = net.input("hidden_in" if stage else "x", HALF, (-1, 4))
            layer = collective(net, x, "ALL_REDUCE", "SUM", 2)
            net.output(layer, name="logits" if stage else "hidden_out")
            nets.append(net)
    parts = [normal(2, 4, dtype=np.float16) for _ in range(2)]
    outputs = run(nets, [{"x": parts[0]}, {"x": parts[1]}, {}, {}], Parallelism(tp_size=2, pp_size=2))
    total = (parts[0].astype(np.float32) + parts[1]).astype(np.float16)
    assert all(np.array_equal(output["logits"], total + total) for output in outputs[2:])


def test_a_rank_gets_what_its_own_neighbour_before_it_sent():
    def stage(name, output):
        net = Net()
        net.output(net.network.add_identity(net.input(name, FLOAT, (-1, 4))), name=output)
        return net

    nets = [stage("x", "hidden_out"), stage("x", "hidden_out"), stage("hidden_in", "y"), stage("hidden_in", "y")]
    parts = [normal(2, 4), normal(2, 4)]
    outputs = run(nets, [{"x": parts[0]}, {"x": parts[1]}, {}, {}], Parallelism(tp_size=2, pp_size=2))
    assert np.array_equal(outputs[2]["y"], parts[0]) and np.array_equal(outputs[3]["y"], parts[1])


def test_a_failed_rank_ends_the_others_with_its_own_error():
    feeds = [{"x": normal(2, 4)}, {"x": normal(2, 5)}, {"x": normal(2, 4)}]
    with pytest.raises(BuildError, match=r"rank 1: .*'x' came out as float32 \[2, 5\]"):
        run([rank_network(ranks=3) for _ in feeds], feeds, Parallelism(tp_size=3))


def test_ranks_that_would_deadlock_on_gpus_are_found_out():
    feeds = [{"x": normal(2, 4)}, {"x": normal(2, 4)}]
    two = Parallelism(tp_size=2)
    with pytest.raises(BuildError, match=r"rank \d: rank 1 is in collective 'other'.*'o_proj:all_reduce'"):
        run([rank_network(), rank_network(name="other")], feeds, two)
    alone = Net()
    alone.output(alone.network.add_identity(alone.input("x", FLOAT, (-1, 4))))
    with pytest.raises(BuildError, match=r"rank 0 waits in 'o_proj:all_reduce'; rank 1 has ended"):
        run([rank_network(), alone], feeds, two)
    with pytest.raises(BuildError, match="deadlock"):
        crossed = [rank_network(group=[0, 1]), rank_network(group=[1, 2]), rank_network(group=[0, 2])]
        run(crossed, [*feeds, {"x": normal(2, 4)}], Parallelism(tp_size=3))


def test_one_rank_alone_cannot_run_a_collective():
    with pytest.raises(BuildError, match=r"o_proj:all_reduce.*run them in lockstep"):
        rank_network().run(x=normal(2, 4))
