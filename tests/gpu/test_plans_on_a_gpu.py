"""Plans on the GPUs of this machine: what the fake GPU of the other tests cannot show. Skipped where there is none."""

import sys
from pathlib import Path

import numpy as np
import pytest

import builder
from builder.machine import this_machine
from builder.targets.facts import TARGETS

sys.path.append(str(Path(__file__).parent.parent / "builder"))
from tiny_models import make_step, random_ids, run_mixed, save_model

MACHINE = this_machine()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not MACHINE.gpus, reason=f"needs an NVIDIA GPU: {MACHINE.describe_gpus()}"),
]
BOUND = 0.03  # of a float16 network on logits of a few units; the interpreter stays below 0.006


def target():
    """TensorRT for RTX where it serves this GPU, else TensorRT."""
    return "tensorrt-rtx" if MACHINE.sms[0] in TARGETS["tensorrt-rtx"].sms else "tensorrt"


def load(tmp_path, **options):
    source, engine = tmp_path / "model", tmp_path / "engine"
    save_model(source, "llama", num_hidden_layers=2)
    engine.mkdir()
    limits = {"max_batch_size": 4, "max_num_tokens": 256, "max_seq_len": 128, "tokens_per_block": 16}
    build_options = builder.BuildOptions(target=target(), sms=[MACHINE.sms[0]], **limits, **options)
    builder.build_engine(source, engine, build_options, plansmith_version="test")
    return builder.load_engine(engine, num_blocks=21), builder.load_reference(source, num_blocks=12)


@pytest.mark.parametrize("weights", ["embedded", "external"])
def test_ragged_steps_give_the_references_logits(tmp_path, weights):
    engine, reference = load(tmp_path, weights=weights)
    ids = random_ids()
    assert np.abs(run_mixed(engine, ids) - run_mixed(reference, ids)).max() < BOUND
    engine.close()


def test_decodes_from_a_graph_give_what_a_first_step_gives(tmp_path):
    engine, _ = load(tmp_path)
    step = make_step([(np.array([7]), 0), (np.array([9]), 0)], [[0, 1], [2, 3]], 16)
    first = engine.step(step).copy()
    for _ in range(4):
        np.testing.assert_array_equal(engine.step(step), first)
    engine.close()


@pytest.mark.skipif(len(MACHINE.gpus) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("division", [{"tp_size": 2}, {"pp_size": 2}])
def test_two_gpus_share_a_model(tmp_path, division):
    engine, reference = load(tmp_path, **division)
    ids = random_ids()
    assert np.abs(run_mixed(engine, ids) - run_mixed(reference, ids)).max() < BOUND
    engine.close()
