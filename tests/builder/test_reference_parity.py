"""The network is written once; here it is held against transformers, family by family."""

import numpy as np
import pytest
from tiny_models import MIXTURES, TRAITS, expected_logits, random_ids, run_mixed, save_model

import builder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases, llama3 rope": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama, linear rope, wide heads": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}, "head_dim": 32},
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "num_key_value_heads": 4},
    ),
    "mistral, window shorter than the sequence": ("mistral", {"sliding_window": 37}),
    "mistral, full attention": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen2, one sliding layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    **MIXTURES,
    **TRAITS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_computes_what_transformers_computes(tmp_path, family):
    model_type, settings = FAMILIES[family]
    model = save_model(tmp_path, model_type, **settings)
    ids = random_ids()
    expected = expected_logits(model, ids)
    assert expected.std() > 0.5  # logits that could show a mistake
    engine = builder.load_reference(tmp_path, num_blocks=12)
    assert np.abs(run_mixed(engine, ids) - expected).max() < 1e-4


def test_dynamic_rope_beyond_the_trained_length_is_ntk_at_max_seq_len(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = save_model(tmp_path, "llama", max_position_embeddings=64, rope_parameters=rope)
    ids = random_ids()  # 100 tokens: transformers stretches to exactly this length
    options = builder.BuildOptions(max_seq_len=100)
    engine = builder.load_reference(tmp_path, options, num_blocks=12)
    assert np.abs(run_mixed(engine, ids) - expected_logits(model, ids)).max() < 1e-4


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}


@pytest.mark.parametrize(("original", "warns"), [(128, False), (64, True)])
def test_longrope_has_the_factors_of_the_length_that_the_engine_is_made_for(tmp_path, caplog, original, warns):
    settings = {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": original}
    model = save_model(tmp_path, "phi3", **settings)
    ids = random_ids()  # 100 tokens: transformers takes the factors for this length, not for the model's 256
    engine = builder.load_reference(tmp_path, builder.BuildOptions(max_seq_len=100), num_blocks=12)
    assert np.abs(run_mixed(engine, ids) - expected_logits(model, ids)).max() < 1e-4
    assert ("longrope's long factors are compiled in for max_seq_len 100" in caplog.text) == warns
