"""The run-time of TensorRT engines on a fake GPU whose "plans" are interpreted; all else is what runs on a real one."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import MEMORY, FakeDevice, fake_engine
from tiny_models import expected_logits, make_step, random_ids, run_mixed, save_model

import builder
from builder.parallel import Parallelism
from builder.targets.tensorrt.options import NetworkOptions
from builder.targets.tensorrt.runtime.cuda_device import CudaDevice
from builder.targets.tensorrt.runtime.engine import TensorRtEngine
from builder.targets.tensorrt.runtime.launch import GraphLauncher
from builder.targets.tensorrt.runtime.messages import step_message
from builder.targets.tensorrt.runtime.nccl import _DeviceBytes, load_nccl
from builder.targets.tensorrt.step_feeds import step_feeds
from plansmith_errors import EngineError

FAKE_GPU = "fake_gpu:open_gpu"
OPTIONS = NetworkOptions(
    dtype="float32", max_batch_size=4, max_num_tokens=160, max_seq_len=128, tokens_per_block=16, sms=(89,)
)
NUM_BLOCKS = 21
PARALLELISMS = [Parallelism(), Parallelism(tp_size=2), Parallelism(pp_size=2), Parallelism(tp_size=2, pp_size=2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, "llama", num_hidden_layers=2)
    return path


@pytest.fixture
def load(tmp_path, checkpoint):
    engines = []

    def load(parallelism=Parallelism(), **arguments):  # noqa: B008 - frozen
        layout = fake_engine(tmp_path, checkpoint, parallelism, OPTIONS)
        arguments = {"num_blocks": NUM_BLOCKS, "gpu": FAKE_GPU, "step_timeout_s": 60} | arguments
        engines.append(TensorRtEngine(layout, **arguments))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def expected(checkpoint):
    ids = random_ids()
    return ids, run_mixed(builder.load_reference(checkpoint, num_blocks=12), ids)


def decode_step(past_lens, token=5, block=0):
    tables = [list(range(block + 4 * row, block + 4 * row + 4)) for row in range(len(past_lens))]
    return make_step([(np.array([token]), past_len) for past_len in past_lens], tables, OPTIONS.tokens_per_block)


def children(engine):
    return engine._group._processes


@pytest.mark.parametrize("parallelism", PARALLELISMS, ids=str)
def test_ragged_steps_give_the_references_logits_on_every_layout_of_gpus(load, expected, parallelism):
    engine = load(parallelism)
    ids, logits = expected
    assert np.abs(run_mixed(engine, ids) - logits).max() < 2e-4
    assert engine.limits.num_blocks == NUM_BLOCKS


def test_a_decode_that_is_replayed_from_a_graph_gives_what_it_gives_without_one(load, monkeypatch):
    launches = []
    launch = FakeDevice.launch
    monkeypatch.setattr(FakeDevice, "launch", lambda self, graph: (launches.append(1), launch(self, graph))[1])
    engine = load()
    steps = [decode_step([0, 0], token=7), decode_step([1, 1], token=9), decode_step([2, 2], token=11)]
    graphed = [engine.step(step).copy() for step in steps]
    assert len(launches) == 2  # the first of a shape runs as it is
    alone = load()
    for step, logits in zip(steps, graphed, strict=True):
        singles = [
            alone.step(
                make_step([(step.input_ids[row : row + 1], step.past_lens[row])], [[4 * row, 4 * row + 1]], 16)
            ).copy()
            for row in (0, 1)
        ]
        np.testing.assert_allclose(np.concatenate(singles), logits, atol=1e-4)


def test_graphs_that_are_not_used_any_more_make_room_for_others():
    device, made = FakeDevice(), []

    class Context:
        def set_input_shape(self, name, shape):
            return True

        def execute_async_v3(self, stream):
            if device.recorded is not None:
                device.recorded.append(lambda: None)
            return True

    launcher = GraphLauncher(device, lambda: (made.append(1), Context())[1], max_graphs=2)
    for width in [1, 1, 2, 2, 1, 3, 3, 2, 2]:
        launcher.launch({"x": (width,)})
    assert len(made) == 1 + 4  # widths 1, 2 and 3 were recorded, and 2 again after 3 had pushed it out


def test_as_many_blocks_as_the_smallest_gpu_has_room_for(load):
    limits = load(Parallelism(tp_size=2), num_blocks=None).limits
    assert 0 < limits.num_blocks <= MEMORY // (2 * 2 * 16 * 16 * 4)


def test_more_blocks_than_fit_are_refused_with_the_numbers(load):
    with pytest.raises(EngineError, match=r"1000000 KV blocks do not fit: the GPU has room for [0-9]+ and the plan"):
        load(num_blocks=1_000_000)


def test_a_rank_that_is_killed_ends_the_engine_with_its_name(load):
    engine = load(Parallelism(tp_size=2))
    (process,) = children(engine).values()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 1 was killed by signal 9; the engine is closed"):
        engine.step(decode_step([0]))
    with pytest.raises(EngineError, match="the engine is closed; load it again"):
        engine.step(decode_step([0]))


def test_a_rank_that_hangs_is_given_up_after_the_time_limit(load):
    engine = load(Parallelism(pp_size=2), step_timeout_s=2)
    (process,) = children(engine).values()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"no answer from rank 0 within 2 s"):
        engine._group.ask(step_message("decode", step_feeds(decode_step([0]), engine.limits, "decode")))
        engine._group.answers()
    engine._end()  # what a failed step does
    assert process.poll() is not None


def test_a_plan_that_is_damaged_on_one_rank_is_told_with_its_rank(tmp_path, checkpoint):
    layout = fake_engine(tmp_path, checkpoint, Parallelism(tp_size=2), OPTIONS)
    (tmp_path / "rank1.plan").write_text("not a plan")
    with pytest.raises(EngineError, match="rank 1: "):
        TensorRtEngine(layout, num_blocks=4, gpu=FAKE_GPU, step_timeout_s=20)


def test_ranks_do_not_outlive_the_process_that_started_them(load):
    engine = load(Parallelism(tp_size=2))
    (process,) = children(engine).values()
    for connection in engine._group._connections.values():
        connection.close()
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is not None


def test_a_step_beyond_the_limits_names_the_input(load):
    engine = load()
    tokens = np.arange(OPTIONS.max_num_tokens + 1) % 90
    with pytest.raises(EngineError, match="build it with larger limits"):
        engine.step(make_step([(tokens, 0)], [list(range(11))], 16))


def test_one_plan_serves_every_fine_tune_whose_weights_lie_beside_it(tmp_path, checkpoint, expected):
    ids, logits = expected
    external = replace(OPTIONS, weights="external")
    fine_tune = tmp_path / "fine-tune"
    tuned = save_model(fine_tune, "llama", num_hidden_layers=2, initializer_range=0.1)
    first = tmp_path / "engine"
    first.mkdir()
    layout = fake_engine(first, checkpoint, Parallelism(tp_size=2), external)
    other = tmp_path / "other"
    other.mkdir()
    fake_engine(other, fine_tune, Parallelism(tp_size=2), external)
    assert run_engine(layout, ids, logits) < 2e-4
    for (name,) in layout.weights:
        (other / name).rename(first / name)
    assert run_engine(layout, ids, expected_logits(tuned, ids)) < 2e-4


def run_engine(layout, ids, logits):
    engine = TensorRtEngine(layout, num_blocks=NUM_BLOCKS, gpu=FAKE_GPU, step_timeout_s=60)
    try:
        return np.abs(run_mixed(engine, ids) - logits).max()
    finally:
        engine.close()


def test_a_machine_without_a_gpu_is_told_so_in_one_line():
    """The real CUDA run-time library, which is all that such a machine lacks a driver for."""
    try:
        device = CudaDevice(0)
    except EngineError as error:
        assert str(error).startswith("cudaSetDevice failed: ") and "\n" not in str(error)
    else:
        device.close()
        pytest.skip("this machine has a GPU")


def test_the_addresses_that_nccl_is_given_are_those_of_the_device():
    array = _DeviceBytes(4096, 12).__cuda_array_interface__
    assert (array["data"], array["shape"], array["typestr"]) == ((4096, False), (12,), "|u1")
    assert load_nccl().UniqueId.from_bytes(bytes(128))
