"""A rotated model computes what the model before it did, and rounds better where a few channels are large."""

import json

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import GRANITE, PHI3, expected_logits, random_ids, run_mixed, save_model

import builder
from plansmith_errors import ConfigError, QuantizeError
from quantize import Recipe, open_checkpoint, quantize_checkpoint
from quantize.rotation.orthogonal import RandomHadamard

KEPT = {"name": "rotated", "linears": {"scheme": "none"}}
INT4 = {"name": "int4", "linears": {"scheme": "int4", "group_size": 32}}
FAMILIES = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, hidden size of 3 x 32": ("llama", {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3, tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3": PHI3,
    "granite": GRANITE,
}


def quantize(source, output, recipe, **changes):
    quantize_checkpoint(source, output, Recipe.model_validate({**recipe, **changes}), calibration_tools=TOOLS)
    return output


@given(st.integers(1, 200), st.integers(0, 5))
def test_every_size_has_an_orthogonal_matrix_without_large_entries(size, seed):
    matrix = RandomHadamard(size, seed).matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    # A Hadamard matrix has entries of 1 / sqrt(size), a Hartley matrix of up to sqrt(2) times that.
    assert np.abs(matrix).max() <= np.sqrt(2 / size) * 1.0001


@pytest.mark.parametrize("rotations", [["r1"], ["r2"], ["r1", "r2"]], ids="+".join)
@pytest.mark.parametrize(("family", "settings"), FAMILIES.values(), ids=FAMILIES.keys())
def test_rotated_weights_differ_and_give_the_same_logits(tmp_path, family, settings, rotations):
    model = save_model(tmp_path / "model", family, **settings)
    out = quantize(tmp_path / "model", tmp_path / "out", KEPT, rotations=rotations)
    ids = random_ids(2, 40)
    logits = run_mixed(builder.load_reference(out, num_blocks=8), ids)
    np.testing.assert_allclose(logits, expected_logits(model, ids), atol=2e-4, rtol=1e-4)
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(out / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not np.allclose(before[name], after[name], atol=1e-2)


def test_weights_of_heavy_tails_round_better_after_it(tmp_path):
    save_model(tmp_path / "model", "llama")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in weights:
        if "_proj" in name:
            weights[name] = (0.1 * rng.standard_t(2.5, weights[name].shape)).astype(np.float32)
    save_file(weights, tmp_path / "model" / "model.safetensors")
    ids = random_ids(2, 40)
    wanted = run_mixed(builder.load_reference(tmp_path / "model", num_blocks=8), ids)
    errors = {}
    for rotations in ((), ("r1", "r2")):
        out = quantize(tmp_path / "model", tmp_path / f"out{len(rotations)}", INT4, rotations=rotations)
        errors[rotations] = np.linalg.norm(run_mixed(builder.load_reference(out, num_blocks=8), ids) - wanted)
    assert errors["r1", "r2"] < 0.8 * errors[()]


def test_calibration_sees_the_rotated_model(tmp_path):
    save_with_tokenizer(tmp_path / "model")
    recipe = {
        "name": "gptq",
        "linears": {"scheme": "int4", "group_size": 32, "method": "gptq"},
        "calibration": {"text": write_text(tmp_path / "text.txt"), "num_samples": 8, "sequence_length": 64},
    }
    out = quantize(tmp_path / "model", tmp_path / "out", recipe, rotations=["r1", "r2"])
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    assert entry["recipe"]["rotations"] == ["r1", "r2"]
    assert entry["source"]["origin"].endswith("rotated (r1, r2)")
    assert 0 < entry["tensors"]["model.layers.1.mlp.down_proj.weight"]["output_error"] < 0.2


def test_r1_unties_the_head_and_says_so(tmp_path, caplog):
    save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    out = quantize(tmp_path / "model", tmp_path / "out", KEPT, rotations=["r1"])
    assert "unties the head" in caplog.text
    rotated = open_checkpoint(out)
    assert not rotated.is_tied
    assert "lm_head.weight" in rotated


def test_kept_matrices_keep_their_type(tmp_path):
    save_model(tmp_path / "model", "llama", dtype="bfloat16").bfloat16().save_pretrained(tmp_path / "model")
    out = open_checkpoint(quantize(tmp_path / "model", tmp_path / "out", KEPT, rotations=["r1", "r2"]))
    assert {info.dtype for info in out} == {"bfloat16"}


def test_a_rotation_named_twice_is_refused():
    with pytest.raises(ValueError, match="once at most"):
        Recipe.model_validate({**KEPT, "rotations": ["r1", "r1"]})


def test_a_model_of_another_family_is_refused_before_any_work(tmp_path):
    save_model(tmp_path / "model", "llama")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    with pytest.raises((QuantizeError, ConfigError), match="rotations are for llama"):
        quantize(tmp_path / "model", tmp_path / "out", KEPT, rotations=["r1"])
    assert not (tmp_path / "out").exists()
