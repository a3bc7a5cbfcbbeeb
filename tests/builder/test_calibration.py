"""Calibration with the real network: what is computed, what is folded, and that the outputs gain by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text
from tiny_models import FAMILIES_WITH_TRAITS, expected_logits, random_ids, run_mixed

import builder
import quantize
from plansmith_errors import QuantizeError
from quantize.architectures import norms_add_one
from quantize.calibration.folding import Folding, input_channels
from quantize.calibration.linear_sets import linear_sets

METHODS = ("importance", "awq", "gptq")
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def run(source: Path, output: Path, recipe: quantize.Recipe) -> quantize.QuantizeReport:
    return quantize.quantize_checkpoint(source, output, recipe, calibration_tools=TOOLS)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, sliding window": ("mistral", {"sliding_window": 23}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    **FAMILIES_WITH_TRAITS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_gives_the_hidden_states_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_with_tokenizer(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    ids = random_ids(1)[0]
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    seen: dict[str, tuple[int, ...]] = {}
    hidden = runner.embed(ids)
    for layer in range(runner.num_layers):
        weights = runner.layer_weights(layer)
        hidden = runner.run_layer(layer, weights, hidden, lambda name, x: seen.update({name: x.shape}))
    logits = runner.logits(hidden, 0, runner.vocab_size)
    assert np.abs(logits - expected_logits(model, ids[None])[0]).max() < 1e-4
    assert len(seen) == 9 * runner.num_layers  # keys and values as well
    assert seen["model.layers.1.self_attn.v_proj.v_scale"][0] == 100
    assert seen["model.layers.1.mlp.down_proj.weight"] == (100, 96)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folded_factors_leave_the_layer_as_it_was(tmp_path: Path, family: str, dtype: str) -> None:
    from quantize.dtypes import BFLOAT16

    save_with_tokenizer(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    stored = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float32)
    weights = runner.layer_weights(0)
    ones = {name: np.float32(norms_add_one(FAMILIES[family][0]) and "norm" in name) for name in weights}
    for name in [name for name, array in weights.items() if array.ndim == 1]:
        weights[name] = (weights[name] - ones[name]).astype(stored).astype(np.float32) + ones[name]
    hidden = runner.embed(random_ids(1)[0])
    before = runner.run_layer(0, weights, hidden)
    rng = np.random.default_rng(0)
    for linears in linear_sets(FAMILIES[family][0], None, 0):
        names = [f"model.layers.0.{module}.weight" for module in linears.modules]
        producer = f"model.layers.0.{linears.producer}"
        channels = input_channels(weights[names[0]].shape[1], len(weights[f"{producer}.weight"]), runner.head_dim)
        folding = Folding(weights, producer, channels, stored, norms_add_one(FAMILIES[family][0]))
        factors = folding.fold(folding.shared(rng.lognormal(0, 1.5, len(channels)).astype(np.float32)))
        assert factors.std() > 0.1
        for name in names:
            weights[name] = weights[name] * factors
        for name, tensor in folding.changed.items():
            assert tensor.arrays[0].dtype == stored
            np.testing.assert_array_equal(tensor.arrays[0].astype(np.float32) + ones[name], weights[name])
    after = runner.run_layer(0, weights, hidden)
    assert np.abs(after - before).max() < 1e-4 * max(1.0, np.abs(before).max())


def error_of(source: Path, output: Path) -> float:
    """Of the logits, relative."""
    ids = random_ids()
    expected, found = (run_mixed(builder.load_reference(path, num_blocks=12), ids) for path in (source, output))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_the_model_gains_and_all_is_recorded(source: Path, text: Path, tmp_path: Path) -> None:
    rtn = quantize.Recipe.model_validate({"name": "rtn", "linears": {"scheme": "int4", "group_size": 32}})
    quantize.quantize_checkpoint(source, tmp_path / "rtn", rtn)
    rounded = error_of(source, tmp_path / "rtn")
    for method in METHODS:
        report = run(source, tmp_path / method, calibrated(method, text))
        assert error_of(source, tmp_path / method) < rounded
        config = quantize.open_checkpoint(tmp_path / method).config["quantization_config"]
        entry = config["tensors"]["model.layers.1.mlp.down_proj.weight"]
        assert entry["method"] == method and ("output_error" in entry) == (method != "importance")
        assert config["calibration"]["num_tokens"] == 16 * 64 and config["calibration"]["text"] == "words.txt"
        assert "calibration" not in config["recipe"]
        assert {tensor.method for tensor in report.tensors} == {None, method}


@pytest.mark.parametrize("method", METHODS)
def test_same_input_same_bytes_wherever_the_activations_lie(
    source: Path, text: Path, tmp_path: Path, method: str
) -> None:
    run(source, tmp_path / "a", calibrated(method, text))
    run(source, tmp_path / "b", calibrated(method, text, max_activation_gb=0.0))
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(
        p.name for p in (tmp_path / "a").iterdir()
    )


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_each_linear_may_be_rounded_for_itself(source: Path, text: Path, tmp_path: Path, method: str) -> None:
    """As the papers do it: half of the work, and what earlier linears did to the inputs stays."""
    rtn = quantize.Recipe.model_validate({"name": "rtn", "linears": {"scheme": "int4", "group_size": 32}})
    quantize.quantize_checkpoint(source, tmp_path / "rtn", rtn)
    costs = {}
    for compensates in (True, False):
        output, told = tmp_path / str(compensates), list[quantize.CostEstimate]()
        recipe = calibrated(method, text, compensates_drift=compensates)
        tools = quantize.CalibrationTools(builder.calibration_runner, on_estimate=told.append)
        quantize.quantize_checkpoint(source, output, recipe, calibration_tools=tools)
        costs[compensates] = told[0].flops
        record = quantize.open_checkpoint(output).config["quantization_config"]["calibration"]
        assert record["compensates_drift"] is compensates
    alone, whole = (tmp_path / str(compensates) / "model.safetensors" for compensates in (False, True))
    assert alone.read_bytes() != whole.read_bytes()
    assert error_of(source, alone.parent) < error_of(source, tmp_path / "rtn")
    assert costs[False] < costs[True]


def test_a_setting_for_other_methods_is_warned_about(
    source: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(source, tmp_path / "a", calibrated("importance", text, compensates_drift=True))
    assert "compensates_drift has no effect" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_any_target_reads_the_result(source: Path, text: Path, tmp_path: Path, method: str) -> None:
    run(source, tmp_path / "q", calibrated(method, text, {"symmetric": method != "awq"}))
    names = set(quantize.open_checkpoint(source).names())
    stored = {
        name.removesuffix("_scale").removesuffix("_zero_point")
        for name in quantize.open_checkpoint(tmp_path / "q").names()
    }
    assert stored == names, "no tensor is added for the runtime to apply"
    (tmp_path / "engine").mkdir()
    builder.build_engine(
        tmp_path / "q", tmp_path / "engine", builder.BuildOptions(precision="exact"), plansmith_version="1"
    )
    ids = random_ids()
    engine = builder.load_engine(tmp_path / "engine", num_blocks=12)
    reference = run_mixed(builder.load_reference(tmp_path / "q", num_blocks=12), ids)
    assert np.abs(run_mixed(engine, ids) - reference).max() < 1e-3


def test_awq_changes_norms_only_where_all_their_readers_take_part(source: Path, text: Path, tmp_path: Path) -> None:
    mixed = calibrated("awq", text).model_copy(
        update={
            "overrides": (quantize_override("*.k_proj.weight", "int8"), quantize_override("*.up_proj.weight", "none"))
        }
    )
    run(source, tmp_path / "mixed", mixed)
    run(source, tmp_path / "whole", calibrated("awq", text))
    before, mixed_to, whole_to = (quantize.open_checkpoint(p) for p in (source, tmp_path / "mixed", tmp_path / "whole"))
    np.testing.assert_array_equal(before.load(NORM), mixed_to.load(NORM))
    assert not np.array_equal(before.load(NORM), whole_to.load(NORM))
    assert error_of(source, tmp_path / "mixed") < 0.5


def quantize_override(match: str, scheme: str) -> Any:
    from quantize.recipe import Override

    return Override.model_validate({"match": match, "scheme": scheme})


def test_what_cannot_be_calibrated_is_refused_before_any_work(source: Path, text: Path, tmp_path: Path) -> None:
    def refused(message: str, recipe: quantize.Recipe, model: Path = source) -> None:
        with pytest.raises(QuantizeError, match=message) as caught:
            run(model, tmp_path / "out", recipe)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    refused("has 2000 tokens, 90 samples of 64 need 5760", calibrated("awq", text, num_samples=90))
    refused("sequence_length is 300, the model has 256 positions", calibrated("awq", text, sequence_length=300))
    refused("max_seconds allows 1e-09; set calibration.num_samples", calibrated("gptq", text, max_seconds=1e-9))
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((source / name).read_bytes())
    refused("no tokenizer.json found; calibration needs it", calibrated("awq", text), tmp_path / "bare")
