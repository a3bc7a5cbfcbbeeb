"""Keys and values in eight bits, and linears whose inputs are rounded, as the interpreted network computes them."""

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from tiny_models import random_ids, run_mixed

import builder
from builder.network_gate.networks import interpreted_engine
from builder.parallel import Parallelism
from builder.targets.tensorrt.options import NetworkOptions
from plansmith_errors import BuildError
from quantize import quantize_checkpoint
from quantize.recipe import Recipe

OPTIONS = NetworkOptions(
    dtype="float32", max_batch_size=4, max_num_tokens=128, max_seq_len=128, tokens_per_block=16, kv_dtype="int8"
)
BLOCKS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    save_with_tokenizer(path)
    return path


@pytest.fixture
def quantized(source, tmp_path):
    def make(linears, **recipe):
        settings = {"text": write_text(tmp_path / "words.txt"), "num_samples": 8, "sequence_length": 64}
        data = {"name": "test", "linears": linears, "calibration": settings, **recipe}
        quantize_checkpoint(source, tmp_path / "model", Recipe.model_validate(data), calibration_tools=TOOLS)
        return tmp_path / "model"

    return make


def interpreted(path, **options):
    settings = NetworkOptions(**{**vars(OPTIONS), **options})
    garbage = np.random.default_rng(0)
    return interpreted_engine(path, "tensorrt-rtx", Parallelism(), settings, num_blocks=BLOCKS, garbage=garbage)


def differences(path, **options):
    """Of the network's logits from the reference's: mean and the share of tokens with the same best one."""
    ids = random_ids()
    found = run_mixed(interpreted(path, **options), ids)
    expected = run_mixed(builder.load_reference(path, num_blocks=BLOCKS), ids)
    return np.abs(found - expected).mean(), (found.argmax(-1) == expected.argmax(-1)).mean()


def test_calibrated_scales_round_keys_and_values_as_the_reference_does(quantized):
    mean, same = differences(quantized({"scheme": "none"}, kv_cache="int8"))
    assert mean < 2e-3  # a value on the edge of a step falls to either side
    assert same > 0.99


def test_without_scales_each_token_of_a_head_has_its_own(source):
    mean, same = differences(source)
    assert 1e-3 < mean < 0.05  # of logits whose standard deviation is about 1.5
    assert same > 0.9


def test_four_bit_weights_with_eight_bit_inputs(quantized):
    path = quantized({"scheme": "int4", "group_size": 32, "method": "awq", "activations": "fp8"})
    mean, same = differences(path, kv_dtype="auto")
    assert mean < 5e-3
    assert same > 0.99


def test_scales_that_must_be_constants_do_not_go_with_external_weights(quantized):
    path = quantized({"scheme": "nvfp4", "activations": "nvfp4"})
    with pytest.raises(BuildError, match=r"q_proj has nvfp4 activations.*set build.weights to embedded"):
        interpreted(path, kv_dtype="auto", weights="external")
