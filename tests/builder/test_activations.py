"""Quantized inputs, keys and values: what calibration stores of them, and that the reference computes what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from safetensors.numpy import load_file, save_file
from tiny_models import expected_logits, random_ids, run_mixed

import builder
import quantize
from plansmith_errors import CheckpointError, ConfigError, QuantizeError
from quantize.float8 import E4M3_VALUES, cast_e4m3
from quantize.lint import lint_checkpoint
from quantize.quantized_tensor import load_weight
from quantize.recipe import Recipe

LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
DOWN = "model.layers.1.mlp.down_proj"
FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
INT8_SQ = {"scheme": "int8", "activations": "int8", "smoothing": 0.5}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a few input channels that are forty times as large as the others."""
    path = tmp_path_factory.mktemp("outliers")
    save_with_tokenizer(path)
    weights = load_file(path / "model.safetensors")
    for layer in (0, 1):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"][[5, 33]] *= 40
        for linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            weights[f"model.layers.{layer}.{linear}.weight"][:, [5, 33]] /= 40
    save_file(weights, path / "model.safetensors")
    return path


def run(source: Path, output: Path, linears: dict[str, Any], text: Path, **recipe: Any) -> quantize.Checkpoint:
    calibration = {"text": text, "num_samples": 8, "sequence_length": 64}
    data = {"name": "test", "linears": linears, "calibration": calibration, **recipe}
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(data), calibration_tools=TOOLS)
    return quantize.open_checkpoint(output)


def logits(path: Path) -> np.ndarray:
    return run_mixed(builder.load_reference(path, num_blocks=12), random_ids())


def observed(source: Path, sample_of: quantize.Checkpoint, text: Path) -> dict[str, np.ndarray]:
    """Inputs, keys and values that transformers computes for the calibration windows."""
    import torch
    import transformers

    ids = np.array([int(word[1:]) for word in text.read_text().split()])
    settings = sample_of.config["quantization_config"]["calibration"]
    windows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
    chosen = np.sort(np.random.default_rng(settings["seed"]).choice(len(windows), 8, replace=False))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    seen: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].numpy().copy())
            )
    with torch.inference_mode():
        for window in windows[chosen]:
            cache = model(torch.from_numpy(window[None]), use_cache=True).past_key_values
            for layer in range(2):
                seen.setdefault(f"k{layer}", []).append(cache.layers[layer].keys.numpy())
                seen.setdefault(f"v{layer}", []).append(cache.layers[layer].values.numpy())
    return {name: np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]) for name, parts in seen.items()}


def test_static_scales_are_the_largest_inputs_that_transformers_sees(tmp_path: Path, source: Path, text: Path) -> None:
    checkpoint = run(source, tmp_path / "out", FP8, text, kv_cache="int8")
    seen = observed(source, checkpoint, text)
    for layer in range(2):
        for linear in LINEARS:
            name = f"model.layers.{layer}.{linear}"
            scale = checkpoint.load(f"{name}.input_scale")
            assert scale.shape == () and scale.dtype == np.float32
            # Inputs of the second layer come from a first one whose weights were kept in floats.
            assert scale == pytest.approx(np.abs(seen[name]).max() / 448, rel=1e-4)
        for kind in "kv":
            stored = checkpoint.load(f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale")
            assert stored == pytest.approx(np.abs(seen[f"{kind}{layer}"]).max() / 127, rel=1e-4)
    entry = checkpoint.config["quantization_config"]["tensors"][f"{DOWN}.weight"]
    assert entry["activations"] == {"scheme": "fp8", "scale": "static"}
    assert checkpoint.config["quantization_config"]["kv_cache"] == {"scheme": "int8"}


def test_linears_of_one_input_share_its_scale(tmp_path: Path, outliers: Path, text: Path) -> None:
    checkpoint = run(outliers, tmp_path / "out", INT8_SQ, text)
    for group in (("q", "k", "v"), ("gate", "up")):
        module = "self_attn" if "q" in group else "mlp"
        scales = {float(checkpoint.load(f"model.layers.1.{module}.{name}_proj.input_scale")) for name in group}
        assert len(scales) == 1


@pytest.mark.parametrize("fold", [True, False])
def test_smoothing_alone_changes_no_output(tmp_path: Path, source: Path, text: Path, fold: bool) -> None:
    """With weights in int8 the outputs change by their rounding; smoothing must not add an error of another size."""
    rule = {**INT8_SQ, "activation_scale": "token", "fold_smoothing": fold}
    checkpoint = run(source, tmp_path / "out", rule, text)
    for name in ("model.layers.0.mlp.gate_proj.weight", f"{DOWN}.weight", "model.layers.1.self_attn.o_proj.weight"):
        weight = load_weight(checkpoint, name)
        assert (weight.pre_quant_scale is not None) == (not fold)
        if not fold:
            original = quantize.open_checkpoint(source).load_float32(name)
            error = np.linalg.norm(weight.effective() - original) / np.linalg.norm(original)
            assert error < 0.02
    expected = logits(source)
    assert np.linalg.norm(logits(tmp_path / "out") - expected) < 0.08 * np.linalg.norm(expected)


def test_smoothed_fp8_with_one_scale_per_matrix_can_be_read(tmp_path: Path, source: Path, text: Path) -> None:
    """Its description left out that the scale is the matrix's."""
    checkpoint = run(source, tmp_path / "out", {**FP8, "smoothing": 0.5, "fold_smoothing": False}, text)
    assert quantize.load_weight(checkpoint, f"{DOWN}.weight").scales is not None
    assert lint_checkpoint(tmp_path / "out") == []


def test_smoothing_saves_int8_from_outliers_of_the_inputs(tmp_path: Path, outliers: Path, text: Path) -> None:
    expected = logits(outliers)
    errors = {}
    for name, rule in {
        "plain": {"scheme": "int8", "activations": "int8"},
        "folded": INT8_SQ,
        "stored": {**INT8_SQ, "fold_smoothing": False},
    }.items():
        run(outliers, tmp_path / name, rule, text)
        errors[name] = np.linalg.norm(logits(tmp_path / name) - expected) / np.linalg.norm(expected)
    assert errors["folded"] < 0.5 * errors["plain"]
    assert errors["stored"] < 0.5 * errors["plain"]


def test_the_reference_rounds_what_the_checkpoint_says(tmp_path: Path, source: Path, text: Path) -> None:
    """One linear and its input by hand: e4m3 of the input, times the weight as it is stored."""
    import torch

    from builder.targets.reference.input_rounding import input_rounding

    checkpoint = run(source, tmp_path / "out", FP8, text)
    weight = load_weight(checkpoint, f"{DOWN}.weight")
    x = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    scale = checkpoint.load(f"{DOWN}.input_scale")
    by_hand = E4M3_VALUES[cast_e4m3(x / scale).view(np.uint8)] * scale
    np.testing.assert_array_equal(input_rounding(weight)(torch.from_numpy(x)).numpy(), by_hand)


def test_inputs_by_token_need_no_calibration(tmp_path: Path, source: Path) -> None:
    rule = {"scheme": "int8", "activations": "int8", "activation_scale": "token"}
    recipe = Recipe.model_validate({"name": "test", "linears": rule})
    assert not recipe.is_calibrated
    quantize.quantize_checkpoint(source, tmp_path / "out", recipe)
    expected = logits(source)
    assert 0 < np.linalg.norm(logits(tmp_path / "out") - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["fp8-static", "fp8-kv8", "int8-sq", "int8-kv8", "nvfp4-w4a4"])
def test_built_in_recipes_stay_near_the_model(tmp_path: Path, source: Path, text: Path, name: str) -> None:
    recipe = quantize.load_recipe(name).model_dump(exclude={"calibration"}, exclude_none=True)
    run(source, tmp_path / "out", recipe.pop("linears"), text, **recipe)
    expected = logits(source)
    error = np.linalg.norm(logits(tmp_path / "out") - expected) / np.linalg.norm(expected)
    assert 0 < error < (0.7 if name == "nvfp4-w4a4" else 0.25)


def test_w4a8_has_awq_weights_and_scales_of_the_folded_inputs(tmp_path: Path, outliers: Path, text: Path) -> None:
    rule = {"scheme": "int4", "group_size": 32, "method": "awq", "activations": "fp8"}
    checkpoint = run(outliers, tmp_path / "out", rule, text)
    entry = checkpoint.config["quantization_config"]["tensors"]["model.layers.0.mlp.gate_proj.weight"]
    assert (entry["method"], entry["activations"]["scheme"]) == ("awq", "fp8")
    # The factors of AWQ made the outliers of the input smaller, and the scale is that of what is left.
    norm = np.abs(checkpoint.load("model.layers.0.post_attention_layernorm.weight")).max()
    before = np.abs(quantize.open_checkpoint(outliers).load("model.layers.0.post_attention_layernorm.weight")).max()
    plain = run(outliers, tmp_path / "plain", FP8, text).load("model.layers.0.mlp.gate_proj.input_scale")
    assert norm < before
    assert checkpoint.load("model.layers.0.mlp.gate_proj.input_scale") < plain


def test_a_layer_that_saw_only_zeros_is_named(tmp_path: Path, text: Path) -> None:
    save_with_tokenizer(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = 0  # nothing reaches down_proj
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(QuantizeError, match=r"nothing but zeros.*model\.layers\.1\.mlp\.down_proj"):
        run(tmp_path / "model", tmp_path / "out", FP8, text)


def test_a_set_that_cannot_be_folded_says_that_it_is_not_smoothed(
    tmp_path: Path, source: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    override = {"match": "*.layers.0.self_attn.k_proj.weight", "scheme": "none"}
    checkpoint = run(source, tmp_path / "out", INT8_SQ, text, overrides=[override])
    assert "model.layers.0.self_attn.q_proj.weight: nothing before it can take up" in caplog.text
    expected = logits(source)
    assert np.linalg.norm(logits(checkpoint.path) - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize("rule", [{**INT8_SQ, "fold_smoothing": False}, FP8], ids=["int8-sq", "fp8"])
def test_the_cpu_engine_multiplies_by_stored_factors_and_says_what_it_leaves_in_floats(
    tmp_path: Path, outliers: Path, text: Path, rule: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(outliers, tmp_path / "out", rule, text, kv_cache="fp8")
    (tmp_path / "engine").mkdir()
    builder.build_engine(
        tmp_path / "out", tmp_path / "engine", builder.BuildOptions(precision="exact"), plansmith_version="0"
    )
    assert "static" in caplog.text and "activations of the checkpoint are not used" in caplog.text
    assert "fp8 scales are not used" in caplog.text
    found = run_mixed(builder.load_engine(tmp_path / "engine", num_blocks=12, num_threads=1), random_ids())
    expected = logits(outliers)
    limit = 0.1 if rule["scheme"] == "int8" else 0.4  # of fp8 weights with one scale, requantized to int8
    assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


def test_a_missing_or_zero_scale_is_found_by_lint_and_by_the_reader(tmp_path: Path, source: Path, text: Path) -> None:
    from quantize.lint import lint_checkpoint

    run(source, tmp_path / "out", {**INT8_SQ, "fold_smoothing": False}, text, kv_cache="fp8")
    assert lint_checkpoint(tmp_path / "out") == []
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{DOWN}.input_scale")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.array(0, np.float32)
    save_file(tensors, file)
    missing, zero = lint_checkpoint(tmp_path / "out", check_values=True)
    assert str(missing).startswith(f"missing: {DOWN}.input_scale")
    assert str(zero).startswith("scale: model.layers.0.self_attn.k_proj.k_scale")
    with pytest.raises(CheckpointError, match="input_scale"):
        load_weight(quantize.open_checkpoint(tmp_path / "out"), f"{DOWN}.weight")


def test_the_record_is_of_the_calibration_that_was_done(tmp_path: Path, source: Path, text: Path) -> None:
    recipe = Recipe.model_validate({"name": "test", "linears": FP8, "calibration": {"num_samples": 3}})
    settings = quantize.CalibrationSettings(text=text, num_samples=2, sequence_length=32)
    tools = quantize.CalibrationTools(builder.calibration_runner, settings=settings)
    quantize.quantize_checkpoint(source, tmp_path / "out", recipe, calibration_tools=tools)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["calibration"]["num_samples"] == 2
    assert "calibration" not in config["recipe"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"scheme": "int8", "activations": "fp8"}, "activations of int8 weights are int8"),
        ({"scheme": "mxfp4", "activations": "fp8"}, "activations of mxfp4 weights are floats"),
        ({"scheme": "fp8", "granularity": "block", "activations": "fp8"}, "fp8 in blocks"),
        ({"scheme": "fp8", "activation_scale": "token"}, "no effect without activations"),
        ({"scheme": "nvfp4", "activations": "nvfp4", "activation_scale": "token"}, "static scale of the tensor"),
        ({"scheme": "int4", "activations": "fp8", "smoothing": 0.5}, "int4 has method awq"),
        ({"scheme": "int8", "activations": "int8", "fold_smoothing": False}, "no effect without smoothing"),
        ({"scheme": "int8", "activations": "int8", "smoothing": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_would_not_be_honoured_are_refused(tmp_path: Path, rule: dict[str, Any], message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"name": "test", "linears": rule}))
    with pytest.raises(ConfigError, match=message):
        quantize.load_recipe(str(path))


def test_calibrated_logits_agree_with_transformers_when_nothing_is_rounded(tmp_path: Path, text: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", {"scheme": "none"}, text, kv_cache="fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"].pop("kv_cache")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(logits(tmp_path / "out"), expected_logits(model, random_ids()), atol=2e-4)
