"""Reading config.json: what is understood, and what is refused because it would be computed wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import ModelSpec
from plansmith_errors import BuildError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 7],
}
QWEN2 = LLAMA | {"model_type": "qwen2"}


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
}


def read(config=None, **changes):
    return ModelSpec.from_hf_config((config or LLAMA) | changes)


def test_llama():
    spec = read()
    assert (spec.head_dim, spec.num_kv_heads, spec.eos_token_ids) == (16, 2, (2, 7))
    assert not spec.qkv_bias and not spec.tie_word_embeddings and spec.sliding_windows == (None,) * 3
    assert read(num_key_value_heads=None).num_kv_heads == 4


def test_families_differ_in_biases_and_norms():
    assert read(QWEN2).qkv_bias and not read(QWEN2).o_bias
    assert read(model_type="qwen3", head_dim=32).qk_norm and read(model_type="qwen3").head_dim == 128
    biased = read(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias


def test_mixtures_of_experts():
    mixtral, qwen = read(MIXTRAL), read(QWEN3_MOE)
    assert mixtral.mixture.sparse_layers == (True,) * 3 and mixtral.mixture.intermediate_size == 96
    assert mixtral.rope.theta == 1e6 and mixtral.sliding_windows == (None,) * 3 and not mixtral.qk_norm
    assert qwen.mixture.sparse_layers == (False, True, False) and qwen.mixture.intermediate_size == 32
    assert qwen.qk_norm and not qwen.mixture.normalizes and qwen.head_dim == 16
    assert read(MIXTRAL, sliding_window=9).sliding_windows == (9,) * 3
    assert read(QWEN3_MOE, sliding_window=9).sliding_windows == (None,) * 3
    assert read(QWEN3_MOE, sliding_window=9, use_sliding_window=True, max_window_layers=3).sliding_windows == (9,) * 3
    with pytest.raises(BuildError, match=r"config\.json: num_experts_per_tok is 9, expected at most num_experts"):
        read(QWEN3_MOE, num_experts_per_tok=9)
    assert read().mixture is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}},
    ],
)
def test_rope_theta_is_found_wherever_the_config_keeps_it(rope):
    assert read(**rope).rope.theta == 5e5


def test_sliding_windows():
    assert read(model_type="mistral", sliding_window=128).sliding_windows == (128,) * 3
    assert read(model_type="mistral", sliding_window=None).sliding_windows == (None,) * 3
    assert read(QWEN2, sliding_window=64, use_sliding_window=False).sliding_windows == (None,) * 3
    sliding = {"sliding_window": 64, "use_sliding_window": True}
    assert read(QWEN2, max_window_layers=2, **sliding).sliding_windows == (None, None, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(QWEN2, layer_types=kinds, **sliding).sliding_windows == (64, None, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected an integer of 1 to"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 64 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim is 15; expected an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, message):
    with pytest.raises(BuildError, match=message) as refused:
        read(**changes)
    assert "\n" not in str(refused.value)


def test_layer_types_must_fit():
    with pytest.raises(BuildError, match="layer_types must name"):
        read(QWEN2, layer_types=["full_attention"])
    with pytest.raises(BuildError, match="layer_types must name"):
        read(QWEN2, layer_types=["full_attention", "chunked_attention", "full_attention"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "hidden_act", "layer_types"]
KEYS += ["num_experts", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step"]
KEYS += ["max_window_layers", "use_sliding_window", "sliding_window", "partial_rotary_factor"]


@given(st.sampled_from(KEYS), JSON, st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]))
def test_any_value_is_read_or_refused_in_one_line(key, value, model_type):
    mixtures = MIXTRAL | QWEN3_MOE if model_type in ("mixtral", "qwen3_moe") else {}
    config = LLAMA | mixtures | {"model_type": model_type, "use_sliding_window": True, key: value}
    try:
        ModelSpec.from_hf_config(config)
    except BuildError as refused:
        assert "\n" not in str(refused)
