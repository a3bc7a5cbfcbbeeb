"""Sensitivity with the real network: what is measured, and that the layer which needs precision gets it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from tiny_models import random_ids

import builder
import quantize
from plansmith_errors import QuantizeError
from quantize.recipe import Recipe
from quantize.sensitivity.divergence import mean_divergence
from quantize.sensitivity.measured import SensitivityMeter
from quantize.sensitivity.units import units_to_choose
from quantize.weight_rule import WeightRule

INT4, INT8 = {"scheme": "int4", "group_size": 32}, {"scheme": "int8"}
PLANTED = "model.layers.1.mlp.down_proj"


def automatic(text: Path, budget: dict[str, float] | None = None, **changes: Any) -> Recipe:
    auto = {"candidates": [INT4, INT8], "budget": budget or {"bits_per_weight": 5.5}, "sequence_length": 64, **changes}
    return Recipe.model_validate({"name": "mixed", "auto": auto, "calibration": {"text": text, "num_samples": 4}})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_gives_the_logits_of_transformers(tmp_path: Path, tied: bool) -> None:
    import torch

    model = save_with_tokenizer(tmp_path, tie_word_embeddings=tied)
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    hidden = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    with torch.inference_mode():
        expected = model.lm_head(model.model.norm(torch.from_numpy(hidden))).numpy()
    parts = [runner.logits(hidden, 0, 50), runner.logits(hidden, 50, 96)]
    assert np.abs(np.concatenate(parts, axis=1) - expected).max() < 1e-4


class _Head:
    """Hidden states that are the logits."""

    vocab_size = 1000

    def logits(self, hidden: np.ndarray, begin: int, end: int) -> np.ndarray:
        return hidden[:, begin:end]


def test_divergence_in_blocks_is_that_of_whole_logits() -> None:
    import torch
    from torch.nn import functional

    rng = np.random.default_rng(0)
    original = rng.normal(0, 8, (5, 1000)).astype(np.float32)
    original[0, 0], original[1, 999] = 300, 300  # the peak in the first and in the last block
    copies = [original + rng.normal(0, size, original.shape).astype(np.float32) for size in (0.0, 0.01, 1.0)]
    found = mean_divergence(_Head(), original, copies.__getitem__, 3)  # type: ignore[arg-type]
    log_p, *log_q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (original, *copies))
    expected = [functional.kl_div(q, log_p, log_target=True, reduction="batchmean").item() for q in log_q]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    assert found[0] == 0


def test_a_measured_divergence_is_that_of_the_model_with_one_set_quantized(source: Path, tmp_path: Path) -> None:
    """The reference engine, over the checkpoint that quantizing this set alone writes, is asked for the truth."""
    checkpoint = quantize.open_checkpoint(source)
    units = units_to_choose(checkpoint, Recipe.model_validate({"name": "x", "linears": INT4}))
    windows = random_ids(2, 64)
    rules = [WeightRule.model_validate(rule) for rule in (INT4, INT8, {"scheme": "none"})]
    meter = SensitivityMeter(builder.calibration_runner(checkpoint), windows, rules, checkpoint.kept_dtype)
    from quantize.calibration.hidden_states import HiddenStates

    with HiddenStates((len(units) * 2, 64, 64), 0, tmp_path) as copies:
        found = meter.divergences(units, copies)
    assert [unit.label for unit in units] == list(found) and len(units) == 8
    baseline = builder.load_reference(source, num_blocks=4)
    for number in (0, 3, 6):
        alone = {"name": "one", "linears": {"scheme": "none"}}
        for index, rule in enumerate((INT4, INT8)):
            overrides = [{"match": name, **rule} for name in units[number].names]
            output = tmp_path / f"{number}-{index}"
            quantize.quantize_checkpoint(source, output, Recipe.model_validate({**alone, "overrides": overrides}))
            engine = builder.load_reference(output, num_blocks=4)
            # Windows of 65 score 64 positions; the token that follows does not count for a divergence.
            kls = [builder.compare_engines(engine, baseline, [*ids, 0], window=65).kl_per_token for ids in windows]
            option = found[units[number].label][index]
            assert option.error == pytest.approx(float(np.mean(kls)), rel=1e-2 if index == 0 else 0.5, abs=1e-6)
        assert found[units[number].label][2].error == 0


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One matrix whose groups hold an outlier each, so that four bits lose the rest; up_proj makes good for them."""
    from safetensors.numpy import load_file, save_file

    path = tmp_path_factory.mktemp("planted")
    save_with_tokenizer(path)
    weights = {name: np.array(array) for name, array in load_file(path / "model.safetensors").items()}
    weights[f"{PLANTED}.weight"][:, ::32] *= 30
    weights[f"{PLANTED.replace('down', 'up')}.weight"][::32] /= 30
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run(source: Path, output: Path, recipe: Recipe, **tools: Any) -> dict[str, Any]:
    quantize.quantize_checkpoint(source, output, recipe, calibration_tools=replace(TOOLS, **tools))
    config: dict[str, Any] = quantize.open_checkpoint(output).config["quantization_config"]
    return config


@pytest.mark.parametrize("sensitivity", ["kl", "output"])
def test_the_sensitive_set_gets_the_precision(planted: Path, text: Path, tmp_path: Path, sensitivity: str) -> None:
    told: list[Any] = []
    recipe = automatic(text, {"bits_per_weight": 5.1}, sensitivity=sensitivity)
    config = run(planted, tmp_path / "out", recipe, on_estimate=told.append, on_choice=told.append)
    auto = config["auto"]
    assert config["tensors"][f"{PLANTED}.weight"]["scheme"] == "int8" and auto["sets"][PLANTED]["chosen"] == 1
    errors = {name: found["errors"][0] for name, found in auto["sets"].items()}
    assert max(errors, key=lambda name: errors[name]) == PLANTED
    assert auto["text"]["num_tokens"] == 2 * 64 and auto["text"]["text"] == "words.txt"
    assert told[0].purpose == "measuring sensitivity" and told[0].flops > 0 and told[1].data() == auto
    assert run(planted, tmp_path / "again", recipe)["auto"] == auto


@pytest.mark.parametrize(("budget", "sensitivity"), [("kl", "kl"), ("output_error", "output")])
def test_an_error_is_kept_with_the_least_size(
    planted: Path, text: Path, tmp_path: Path, budget: str, sensitivity: str
) -> None:
    predicted, bits = [], []
    for number, allowed in enumerate((1.0, 0.3, 0.1) if budget == "output_error" else (0.3, 0.1, 0.01)):
        recipe = automatic(text, {budget: allowed}, sensitivity=sensitivity)
        auto = run(planted, tmp_path / str(number), recipe)["auto"]
        assert auto["predicted_error"] <= allowed
        predicted.append(auto["predicted_error"])
        bits.append(auto["bits_per_weight"])
    assert predicted == sorted(predicted, reverse=True) and bits == sorted(bits) and bits[0] < bits[-1]
    with pytest.raises(QuantizeError, match=f"{budget} 1e-12 cannot be reached; .* add a more precise candidate"):
        run(planted, tmp_path / "no", automatic(text, {budget: 1e-12}, sensitivity=sensitivity))
    assert not (tmp_path / "no").exists()


def test_a_calibrated_candidate_gets_its_values_by_its_method(planted: Path, text: Path, tmp_path: Path) -> None:
    recipe = automatic(text, candidates=[{**INT4, "method": "gptq"}, INT8])
    recipe = recipe.model_copy(
        update={"calibration": quantize.CalibrationSettings(text=text, num_samples=8, sequence_length=64)}
    )
    config = run(planted, tmp_path / "out", recipe)
    methods = {entry.get("method") for name, entry in config["tensors"].items() if entry["scheme"] == "int4"}
    assert methods == {"gptq"} and config["calibration"]["num_samples"] == 8
    assert config["auto"]["candidates"] == ["int4 g32 gptq", "int8"] and config["auto"]["text"]["num_samples"] == 2
    roomy = recipe.model_copy(update={"auto": automatic(text, {"bits_per_weight": 9}).auto})
    assert "calibration" not in run(planted, tmp_path / "int8", roomy), "no set needs it"


def test_a_run_that_was_killed_after_the_choice_does_not_measure_again(
    source: Path, text: Path, tmp_path: Path
) -> None:
    estimates: list[Any] = []

    def start(output: str, killed_at: int | None, fingerprint: str = "one") -> None:
        def progress(done: int, _total: int, label: str) -> None:
            if "sensitivity" not in label and done == killed_at:
                raise KeyboardInterrupt

        quantize.quantize_checkpoint(
            source,
            tmp_path / output,
            automatic(text),
            progress=progress,
            calibration_tools=replace(TOOLS, on_estimate=estimates.append),
            resume=quantize.Resume(tmp_path / f"{output}.run", fingerprint),
        )

    start("whole", None)
    with pytest.raises(KeyboardInterrupt):
        start("resumed", 5)
    start("resumed", None)
    assert len(estimates) == 2, "one for each of the runs that began"
    names = [path.name for path in sorted((tmp_path / "whole").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "resumed").iterdir())]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        start("other", 5)
    start("other", None, fingerprint="two")
    assert len(estimates) == 4, "another recipe, text or code makes its own choice"


def test_all_experts_of_a_layer_have_one_precision(text: Path, tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    config = run(tmp_path / "model", tmp_path / "out", automatic(text, {"bits_per_weight": 6.5}))
    assert len(config["auto"]["sets"]) == 2 * 3, "q, k and v; o; the experts"
    for layer in range(2):
        experts = {
            entry["scheme"]
            for name, entry in config["tensors"].items()
            if name.startswith(f"model.layers.{layer}.") and ".experts." in name
        }
        assert len(experts) == 1
    assert {entry["scheme"] for name, entry in config["tensors"].items() if "layers" in name} >= {"int4", "int8"}


def test_what_cannot_be_measured_is_refused_before_any_work(source: Path, text: Path, tmp_path: Path) -> None:
    def refused(message: str, recipe: Recipe) -> None:
        with pytest.raises(QuantizeError, match=message) as caught:
            run(source, tmp_path / "out", recipe)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    refused("auto.sequence_length is 300, the model has 256 positions", automatic(text, sequence_length=300))
    hasty = quantize.CalibrationSettings(text=text, max_seconds=1e-9)
    refused("choose sensitivity output, or fewer", automatic(text).model_copy(update={"calibration": hasty}))
    long = quantize.CalibrationSettings(text=text, num_samples=90, sequence_length=64)
    gptq = automatic(text, candidates=[{**INT4, "method": "gptq"}, INT8]).model_copy(update={"calibration": long})
    refused("has 2000 tokens, 90 samples of 64 need", gptq)
