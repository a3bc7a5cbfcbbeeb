"""Models with experts through calibration: each expert by its own tokens, and none in silence without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text
from safetensors.numpy import load_file, save_file
from tiny_models import MIXTURES, expected_logits, random_ids, run_mixed

import builder
import quantize
from quantize.lint import lint_checkpoint
from quantize.mixture import Mixture

METHODS = ("importance", "awq", "gptq")
MODELS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]},
}
# 16 windows of 64 tokens, two experts for each of them: a starved expert is not one that is merely seldom chosen.
FEW = {"min_expert_tokens": 40}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path, request.param, **MODELS[request.param])
    return path


def run(source: Path, output: Path, recipe: quantize.Recipe) -> quantize.QuantizeReport:
    return quantize.quantize_checkpoint(source, output, recipe, calibration_tools=TOOLS)


def mixture_of(path: Path) -> Mixture:
    mixture = Mixture.from_config(quantize.open_checkpoint(path).config, "config.json")
    assert mixture is not None
    return mixture


def starve(source: Path, path: Path, expert: int) -> Path:
    """A copy in which the router of the last layer never chooses ``expert``."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    router = f"model.layers.1.{mixture_of(source).router}.weight"
    # Its score is 0, and of two pairs of opposite scores two are always above that.
    a, minus_a, b, minus_b = np.delete(np.arange(len(weights[router])), expert)[:4]
    weights[router][expert] = 0
    weights[router][minus_a], weights[router][minus_b] = -weights[router][a], -weights[router][b]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("family", MIXTURES)
def test_a_window_gives_the_hidden_states_of_transformers(tmp_path: Path, family: str) -> None:
    import torch

    model_type, settings = MIXTURES[family]
    model = save_with_tokenizer(tmp_path, model_type, **settings)
    ids = random_ids(1)[0]
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    seen: dict[str, int] = {}
    hidden = runner.embed(ids)
    for layer in range(runner.num_layers):
        hidden = runner.run_layer(
            layer, runner.layer_weights(layer), hidden, lambda name, x: seen.update({name: len(x)})
        )
    with torch.inference_mode():
        expected = model.model.norm(torch.from_numpy(hidden)) @ model.get_output_embeddings().weight.T
    assert np.abs(expected.numpy() - expected_logits(model, ids[None])[0]).max() < 1e-4
    mixture = mixture_of(tmp_path)
    tokens = [seen.get(f"model.layers.1.{expert.down}.weight", 0) for expert in mixture.experts]
    assert sum(tokens) == len(ids) * mixture.experts_per_token, "each expert is shown the tokens that it was given"
    assert [seen.get(f"model.layers.1.{expert.up}.weight", 0) for expert in mixture.experts] == tokens


def error_of(source: Path, output: Path) -> float:
    """Of the logits, relative."""
    ids = random_ids()
    expected, found = (run_mixed(builder.load_reference(path, num_blocks=12), ids) for path in (source, output))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def expert_error(source: Path, output: Path, ids: np.ndarray[Any, Any]) -> float:
    """|X dW'| / |X W'| over all experts' linears, X the unquantized model's inputs on tokens of another text."""
    runner = builder.calibration_runner(quantize.open_checkpoint(source))
    hidden, error, norm = runner.embed(ids), 0.0, 0.0
    quantized = quantize.open_checkpoint(output)
    for layer in range(runner.num_layers):
        weights = runner.layer_weights(layer)
        inputs: dict[str, np.ndarray[Any, Any]] = {}
        hidden = runner.run_layer(layer, weights, hidden, lambda name, x, seen=inputs: seen.update({name: x.copy()}))
        for name, x in inputs.items():
            if ".experts." in name:
                change = quantize.load_weight(quantized, name).dequantize() - weights[name]
                error += float(np.square(x @ change.T).sum())
                norm += float(np.square(x @ weights[name].T).sum())
    return float(np.sqrt(error / norm))


def test_experts_gain_by_their_own_tokens_and_all_is_recorded(source: Path, text: Path, tmp_path: Path) -> None:
    rtn = quantize.Recipe.model_validate({"name": "rtn", "linears": {"scheme": "int4", "group_size": 32}})
    quantize.quantize_checkpoint(source, tmp_path / "rtn", rtn)
    ids = np.minimum(random_ids(1, 256, seed=7)[0], random_ids(1, 256, seed=8)[0])
    rounded = expert_error(source, tmp_path / "rtn", ids)
    for method in METHODS:
        run(source, tmp_path / method, calibrated(method, text, **FEW))
        config = quantize.open_checkpoint(tmp_path / method).config["quantization_config"]
        assert config["calibration"]["uncalibrated_experts"] == []
        mixture = mixture_of(source)
        for expert in mixture.experts:
            assert config["tensors"][f"model.layers.1.{expert.down}.weight"]["method"] == method
        assert config["tensors"][f"model.layers.1.{mixture.router}.weight"]["scheme"] == "none"
        assert lint_checkpoint(tmp_path / method) == []
        if method != "awq":  # whose factors are in the stored weights
            assert expert_error(source, tmp_path / method, ids) < 0.95 * rounded
        assert error_of(source, tmp_path / method) < error_of(source, tmp_path / "rtn")


@pytest.mark.parametrize("method", METHODS)
def test_an_expert_without_tokens_is_rounded_to_nearest_and_named(
    source: Path, text: Path, tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    starved = starve(source, tmp_path / "starved", 2)
    mixture = mixture_of(source)
    expert = f"model.layers.1.{mixture.expert_name(2)}"
    with caplog.at_level(logging.WARNING):
        report = run(starved, tmp_path / "q", calibrated(method, text, **FEW))
    assert f"experts saw fewer than 40 calibration tokens and were rounded without them: {expert};" in caplog.text
    config = quantize.open_checkpoint(tmp_path / "q").config["quantization_config"]
    assert config["calibration"]["uncalibrated_experts"] == [expert]
    assert config["calibration"]["min_expert_tokens"] == 40
    by_method = {tensor.name: tensor.method for tensor in report.tensors}
    plain = quantize.Recipe.model_validate(
        {"name": "p", "linears": {"scheme": "int4", "group_size": 32, "scale": "mse"}}
    )
    quantize.quantize_checkpoint(starved, tmp_path / "plain", plain)
    for module in mixture.expert(2):
        name = f"model.layers.1.{module}.weight"
        assert config["tensors"][name]["method"] == by_method[name] == "rtn"
        found, expected = (quantize.load_weight(quantize.open_checkpoint(tmp_path / p), name) for p in ("q", "plain"))
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scales, expected.scales)
    others = [f"model.layers.1.{module}.weight" for module in mixture.expert(1)]
    assert {by_method[name] for name in others} == {method}


def test_same_input_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "a", calibrated("gptq", text))
    run(source, tmp_path / "b", calibrated("gptq", text, max_activation_gb=0.0))
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_awq_leaves_the_norm_of_router_and_experts_alone(source: Path, text: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "q", calibrated("awq", text, **FEW))
    before, after = quantize.open_checkpoint(source), quantize.open_checkpoint(tmp_path / "q")
    for name in ("post_attention_layernorm", mixture_of(source).router):
        np.testing.assert_array_equal(*(x.load(f"model.layers.1.{name}.weight") for x in (before, after)))
    name = "model.layers.1.input_layernorm.weight"
    assert not np.array_equal(before.load(name), after.load(name))


def test_a_setting_for_experts_is_not_ignored_in_silence(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_tokenizer(tmp_path / "dense")
    run(tmp_path / "dense", tmp_path / "q", calibrated("importance", text, **FEW))
    assert "min_expert_tokens has no effect: the model has no experts" in caplog.text
    record = quantize.open_checkpoint(tmp_path / "q").config["quantization_config"]["calibration"]
    assert "uncalibrated_experts" not in record


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"},
    "int8, smoothed": {"scheme": "int8", "activations": "int8", "smoothing": 0.5},
    "int8, factors beside": {"scheme": "int8", "activations": "int8", "smoothing": 0.5, "fold_smoothing": False},
    "w4a8": {"scheme": "int4", "group_size": 32, "method": "awq", "activations": "fp8"},
}


@pytest.mark.parametrize("rule", ACTIVATIONS)
def test_inputs_of_an_expert_without_tokens_get_the_scale_of_the_layers_largest(
    source: Path, text: Path, tmp_path: Path, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    starved = starve(source, tmp_path / "starved", 2)
    settings = {"text": text, "num_samples": 16, "sequence_length": 64, **FEW}
    chosen = {"name": "t", "linears": ACTIVATIONS[rule], "calibration": settings}
    run(starved, tmp_path / "q", quantize.Recipe.model_validate(chosen))
    quantized, mixture = quantize.open_checkpoint(tmp_path / "q"), mixture_of(source)
    prefix = "model.layers.1."
    expert = f"{prefix}{mixture.expert_name(2)}"
    record = quantized.config["quantization_config"]["calibration"]
    assert record["uncalibrated_experts"] == [expert] and f"without them: {expert};" in caplog.text
    assert caplog.text.count("gate and up of experts are not smoothed") == (rule == "int8, smoothed")
    if rule == "fp8":
        for kind in ("gate", "down"):
            scales = [float(quantized.load(f"{prefix}{getattr(e, kind)}.input_scale")) for e in mixture.experts]
            assert scales[2] == max(scales[:2] + scales[3:])
    elif rule == "int8, factors beside":
        for module in mixture.expert(2):
            assert (quantized.load(f"{prefix}{module}.pre_quant_scale") == 1).all()
        assert (quantized.load(f"{prefix}{mixture.expert(1).gate}.pre_quant_scale") != 1).any()
    assert error_of(starved, tmp_path / "q") < 0.8  # where rounding changes a route, all that follows differs


def test_a_stopped_run_still_knows_which_experts_saw_too_few_tokens(source: Path, text: Path, tmp_path: Path) -> None:
    recipe = calibrated("gptq", text, min_expert_tokens=400)  # more than any expert of so short a text gets
    run(source, tmp_path / "whole", recipe)
    record = quantize.open_checkpoint(tmp_path / "whole").config["quantization_config"]["calibration"]
    assert len(record["uncalibrated_experts"]) > 2

    def stop(done: int, total: int, name: str) -> None:
        if done == total - 3:  # in the last layer
            raise KeyboardInterrupt

    for progress in (stop, None):
        resume = quantize.Resume(tmp_path / "state", "the same")
        try:
            quantize.quantize_checkpoint(
                source, tmp_path / "out", recipe, progress=progress, calibration_tools=TOOLS, resume=resume
            )
        except KeyboardInterrupt:
            assert progress is stop
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
