"""Reading config.json: what is understood, and what is refused because it would be computed wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import ModelSpec
from builder.model_spec import SUPPORTED_MODEL_TYPES
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
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


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
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported.*yarn, longrope"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "long_factor is a list of 7; expected a list of 8"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, r"long_factor\[7\] is 0; expected a finite"),
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


GEMMA2 = LLAMA | {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 64}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "num_hidden_layers": 7}
PHI3 = LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 64}


def test_gemma2_has_its_defaults_where_keys_are_missing_and_none_where_they_are_null():
    spec = read(GEMMA2)
    assert spec.sliding_windows == (64, None, 64, None) and spec.head_dim == 256 and spec.attention_scale == 256**-0.5
    assert (spec.attention_soft_cap, spec.logits_soft_cap, spec.embedding_scale) == (50.0, 30.0, 8.0)
    assert spec.post_norms and spec.norms_add_one and spec.tie_word_embeddings and spec.activation == "gelu_tanh"
    assert spec.mlp_norm == "pre_feedforward_layernorm" and read().mlp_norm == "post_attention_layernorm"
    uncapped = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=64)
    assert (uncapped.attention_soft_cap, uncapped.logits_soft_cap, uncapped.attention_scale) == (None, None, 0.125)


def test_gemma3_has_one_rotation_for_layers_that_slide_and_one_for_the_others():
    scaled = {"rope_type": "linear", "factor": 8.0}
    both = {"full_attention": scaled | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    for spec in (read(GEMMA3, rope_scaling=scaled), read(GEMMA3, rope_parameters=both)):
        assert spec.sliding_windows == (64,) * 5 + (None, 64)
        assert [spec.rope_of(layer).theta for layer in (0, 5, 6)] == [1e4, 1e6, 1e4]
        assert [spec.rope_of(layer).factor for layer in (0, 5)] == [1.0, 8.0]
        assert spec.qk_norm and spec.attention_soft_cap is None and spec.max_positions == 256
    assert read(GEMMA3, sliding_window_pattern=2).sliding_windows == (64, None) * 3 + (64,)


def test_the_text_part_of_gemma3_is_read_with_the_defaults_that_published_configs_leave_out():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text | {"eos_token_id": 1}, "eos_token_id": [1, 106]}
    spec = ModelSpec.from_hf_config(whole)
    assert (spec.model_type, spec.num_heads, spec.head_dim, spec.vocab_size) == ("gemma3_text", 8, 256, 262208)
    assert spec.eos_token_ids == (1, 106) and spec.tie_word_embeddings and spec.max_position_embeddings == 131072
    for wrong, message in (
        ({}, "expected a text_config whose model_type is 'gemma3_text'"),
        ({"text_config": {"model_type": "llama"}}, "expected a text_config whose model_type"),
        ({"text_config": text | {"final_logit_softcapping": 30.0}}, "which gemma3 models do not apply"),
    ):
        with pytest.raises(BuildError, match=message):
            ModelSpec.from_hf_config({"model_type": "gemma3", **wrong})


def test_granite_multiplies_and_phi3_turns_a_part_of_each_head():
    multipliers = {"embedding_multiplier": 12, "attention_multiplier": 0.25, "residual_multiplier": 0.22}
    spec = read(LLAMA, model_type="granite", logits_scaling=8.0, **multipliers)
    assert (spec.embedding_scale, spec.attention_scale, spec.residual_scale, spec.logits_scale) == (
        12,
        0.25,
        0.22,
        0.125,
    )
    assert read(LLAMA, model_type="granite", num_key_value_heads=None).num_kv_heads == 4
    phi3 = read(PHI3, partial_rotary_factor=0.75, rope_scaling=LONGROPE | {"type": "su", "rope_type": None} | HALF)
    assert phi3.rope.rope_type == "longrope" and phi3.rope.rotary_dim(phi3.head_dim) == 12 and phi3.rope.factor == 4.0
    assert phi3.rope.takes_long_factors(65) and not phi3.rope.takes_long_factors(64)
    assert phi3.sliding_windows == (None,) * 3 and read(PHI3, sliding_window=9).sliding_windows == (9,) * 3


HALF = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported.*gelu_pytorch_tanh"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA2, {"sliding_window": None}, "sliding_window is missing"),
        (GEMMA2, {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; expected a finite number above 0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e6}}, "expected a mapping for full_attention and one"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (
            PHI3,
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "'linear' is not supported.*default, longrope",
        ),
        (PHI3, {"partial_rotary_factor": 0.2}, "turns 3 of 16 features; expected an even number"),
        (PHI3, {"partial_rotary_factor": 2.0}, "turns 32 of 16 features"),
        (LLAMA | {"model_type": "granite"}, {"logits_scaling": 0}, "logits_scaling is 0"),
        (LLAMA | {"model_type": "granite"}, {"num_local_experts": 4}, "num_local_experts is 4"),
    ],
)
def test_what_a_family_would_compute_otherwise_is_refused(config, changes, message):
    with pytest.raises(BuildError, match=message) as refused:
        read(config, **changes)
    assert "\n" not in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "hidden_act", "layer_types"]
KEYS += ["num_experts", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step"]
KEYS += ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"]
KEYS += ["logits_scaling", "residual_multiplier", "original_max_position_embeddings", "hidden_activation"]
KEYS += ["max_window_layers", "use_sliding_window", "sliding_window", "partial_rotary_factor"]


@given(st.sampled_from(KEYS), JSON, st.sampled_from(SUPPORTED_MODEL_TYPES))
def test_any_value_is_read_or_refused_in_one_line(key, value, model_type):
    mixtures = MIXTRAL | QWEN3_MOE if model_type in ("mixtral", "qwen3_moe") else {}
    config = LLAMA | mixtures | {"model_type": model_type, "use_sliding_window": True, key: value}
    try:
        ModelSpec.from_hf_config(config)
    except BuildError as refused:
        assert "\n" not in str(refused)
