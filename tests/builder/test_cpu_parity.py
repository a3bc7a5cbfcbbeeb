"""The CPU target against the reference, on the weights as a quantized checkpoint stores them."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import GEMMA2, MIXTURES, TRAITS, make_step, random_ids, run_mixed, save_model

import builder
from plansmith_errors import BuildError
from quantize import Recipe, load_weight, open_checkpoint, quantize_checkpoint

INT4 = {"scheme": "int4", "group_size": 32}
RECIPES = {
    "float": {"linears": {"scheme": "none"}},
    "int4 symmetric": {"linears": INT4 | {"symmetric": True}, "embeddings": {"scheme": "int8"}},
    "int4 asymmetric": {"linears": INT4 | {"symmetric": False}, "embeddings": {"scheme": "int8"}},
    "int8": {"linears": {"scheme": "int8"}, "embeddings": {"scheme": "int8"}},
}
FAMILIES = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 37},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
}
FAMILIES = {name: (name, settings) for name, settings in FAMILIES.items()} | MIXTURES | TRAITS
FAMILIES = {name: found for name, found in FAMILIES.items() if found != GEMMA2}  # refused: see below


def quantized(path, recipe, family="llama", **settings):
    save_model(path / "source", family, **settings)
    quantize_checkpoint(path / "source", path / "quantized", Recipe(name="test", **recipe))
    return path / "quantized"


def build_and_load(checkpoint, output, **options):
    output.mkdir()
    builder.build_engine(checkpoint, output, builder.BuildOptions(**options), plansmith_version="1.2.3")
    return builder.load_engine(output, num_blocks=12, num_threads=1)


def largest_error(engine, reference, ids):
    return np.abs(run_mixed(engine, ids) - run_mixed(reference, ids)).max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_exact_engine_computes_what_the_reference_computes(tmp_path, recipe):
    checkpoint = quantized(tmp_path, RECIPES[recipe], tie_word_embeddings=True)
    engine = build_and_load(checkpoint, tmp_path / "engine", precision="exact")
    assert largest_error(engine, builder.load_reference(checkpoint, num_blocks=12), random_ids()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_on_the_cpu(tmp_path, family):
    model_type, settings = FAMILIES[family]
    checkpoint = quantized(tmp_path, RECIPES["int4 asymmetric"], model_type, **settings)
    engine = build_and_load(checkpoint, tmp_path / "engine", precision="exact")
    assert largest_error(engine, builder.load_reference(checkpoint, num_blocks=12), random_ids()) < 1e-4


def test_yarn_scales_cosines_and_sines(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    checkpoint = quantized(tmp_path, RECIPES["float"], "qwen2", rope_parameters=rope)
    engine = build_and_load(checkpoint, tmp_path / "engine", precision="exact")
    assert largest_error(engine, builder.load_reference(checkpoint, num_blocks=12), random_ids()) < 1e-4


def test_soft_capped_attention_is_refused_before_any_work_and_the_advice_holds(tmp_path):
    save_model(tmp_path / "source", GEMMA2[0], **GEMMA2[1])
    with pytest.raises(BuildError, match=r"no soft cap.*attn_logit_softcapping 2; .*tensorrt.*--reference") as refused:
        build_and_load(tmp_path / "source", tmp_path / "engine")
    assert "\n" not in str(refused.value) and not any((tmp_path / "engine").iterdir())
    assert builder.load_reference(tmp_path / "source").limits.max_seq_len == 256


FLOATS = {
    "fp8": {"scheme": "fp8"},
    "fp8 tensor": {"scheme": "fp8", "granularity": "tensor"},
    "fp8 block": {"scheme": "fp8", "granularity": "block"},
    "nvfp4": {"scheme": "nvfp4", "scale": "mse"},
    "mxfp4": {"scheme": "mxfp4", "scale": "best-of-two"},
    "mxfp8": {"scheme": "mxfp8"},
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_computed_as_int8_of_their_values_and_the_manifest_says_so(tmp_path, name):
    checkpoint = quantized(tmp_path, {"linears": FLOATS[name]})
    engine = build_and_load(checkpoint, tmp_path / "engine", precision="exact")
    assert builder.read_manifest(tmp_path / "engine").weights[name.split()[0]] == "requantized to int8 per channel"
    ids = random_ids()
    # Loose against the true values: int8 rounds them once more, about 1% of a weight that is near the mean.
    expected = run_mixed(builder.load_reference(checkpoint, num_blocks=12), ids)
    assert 0 < np.abs(run_mixed(engine, ids) - expected).mean() < 0.05 * expected.std()
    # Tight against a checkpoint whose weights are those values in int8.
    as_int8 = int8_of(checkpoint, tmp_path)
    assert largest_error(engine, builder.load_reference(as_int8, num_blocks=12), ids) < 1e-4


def int8_of(checkpoint, path):
    opened, source = open_checkpoint(checkpoint), path / "source"
    tensors = load_file(source / "model.safetensors")
    values = {name: np.array(load_weight(opened, name).dequantize()) for name in tensors}
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(source, path / "int8", Recipe(name="int8", linears={"scheme": "int8"}))
    return path / "int8"


@pytest.mark.parametrize("recipe", RECIPES)
def test_fast_engine_stays_near_the_reference(tmp_path, recipe):
    checkpoint = quantized(tmp_path, RECIPES[recipe], tie_word_embeddings=True)
    engine = build_and_load(checkpoint, tmp_path / "engine")
    ids = random_ids()
    expected = run_mixed(builder.load_reference(checkpoint, num_blocks=12), ids)
    error = np.abs(run_mixed(engine, ids) - expected)
    # bfloat16, int8 activations and an 8-bit KV cache on a model of random weights, which forgives nothing.
    assert error.mean() < 0.08 * expected.std()


def test_only_the_wanted_logits_are_computed(tmp_path):
    checkpoint = quantized(tmp_path, RECIPES["float"])
    engine = build_and_load(checkpoint, tmp_path / "engine", precision="exact")
    step = make_step([(random_ids()[0], 0)], [np.arange(4)], 32)
    full = engine.step(step).copy()
    for wanted in ([99], [3, 98], []):  # a step of prefill chunks alone wants none
        indices = np.array(wanted, np.int64)
        some = engine.step(with_logits(step, indices))
        assert some.shape == (len(wanted), full.shape[1])
        np.testing.assert_allclose(some, full[indices], atol=1e-5)


def with_logits(step, indices):
    from dataclasses import replace

    return replace(step, logits_indices=indices)
