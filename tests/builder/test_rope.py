"""Inverse frequencies against transformers', for every type of rotary embedding."""

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from builder import BuildOptions, ModelSpec
from builder.rope import rope_frequencies
from plansmith_errors import BuildError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
TYPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn, all given": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
}


def llama(rope, limit=2048):
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=limit, rope_parameters=rope)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("seq_len", [100, 5000])
@pytest.mark.parametrize("rope_type", TYPES)
def test_frequencies_are_those_of_transformers(rope_type, seq_len, theta):
    config = llama(TYPES[rope_type] | {"rope_theta": theta})
    init = ROPE_INIT_FUNCTIONS[TYPES[rope_type]["rope_type"]]
    expected, expected_factor = init(config, "cpu", seq_len=seq_len)
    spec = ModelSpec.from_hf_config(config.to_dict())
    inverse, factor = rope_frequencies(spec.rope, spec.head_dim, seq_len)
    np.testing.assert_allclose(inverse, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor)


def test_plain_frequencies():
    spec = ModelSpec.from_hf_config(llama({"rope_type": "default", "rope_theta": 10000.0}).to_dict())
    inverse, factor = rope_frequencies(spec.rope, 64, 100)
    np.testing.assert_allclose(inverse, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    assert factor == 1.0


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1024),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 4096),
        (YARN | {"rope_theta": 1e4}, 2048),
    ],
)
def test_an_engine_is_built_for_positions_that_the_model_has(rope, longest):
    spec = ModelSpec.from_hf_config(llama(rope, limit=1024).to_dict())
    assert BuildOptions(max_seq_len=longest).resolved_max_seq_len(spec) == longest
    assert BuildOptions().resolved_max_seq_len(spec) == 1024
    with pytest.raises(BuildError, match=f"max_seq_len is {longest + 1}, but the model has {longest} positions"):
        BuildOptions(max_seq_len=longest + 1).resolved_max_seq_len(spec)
