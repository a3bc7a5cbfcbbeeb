"""Calibration of a model that another tool quantized: the real network runs on its dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text

import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.recipe import Recipe

INT4 = {"scheme": "int4", "group_size": 32, "symmetric": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def write_compressed_tensors(path: Path, linears: dict[str, Any], overrides: Any = ()) -> Path:
    """A tiny llama as compressed-tensors stores it."""
    save_with_tokenizer(path / "model")
    recipe = Recipe.model_validate({"name": "first", "linears": linears, "overrides": overrides})
    quantize.quantize_checkpoint(path / "model", path / "neutral", recipe)
    export_checkpoint(path / "neutral", path / "export", ExportOptions("compressed-tensors", dtype="float32"))
    return path / "export"


def run(source: Path, output: Path, recipe: Recipe) -> dict[str, Any]:
    """The entries of config.json."""
    quantize.quantize_checkpoint(source, output, recipe, calibration_tools=TOOLS)
    tensors: dict[str, Any] = json.loads((output / "config.json").read_text())["quantization_config"]["tensors"]
    return tensors


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_same_as_from_its_plain_floats(tmp_path: Path, text: Path, method: str) -> None:
    source = write_compressed_tensors(tmp_path, {"scheme": "int8"})
    run(source, tmp_path / "floats", quantize.load_recipe("none"))
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    del config["quantization_config"]  # now an original model like any other
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    run(source, tmp_path / "ours", calibrated(method, text))
    run(tmp_path / "floats", tmp_path / "expected", calibrated(method, text))
    ours, expected = quantize.open_checkpoint(tmp_path / "ours"), quantize.open_checkpoint(tmp_path / "expected")
    for name in expected.names():
        np.testing.assert_array_equal(ours.load(name), expected.load(name))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_is_stored_as_asked_stays_and_the_rest_is_calibrated(tmp_path: Path, text: Path, method: str) -> None:
    plain = [{"match": "*.self_attn.*", "scheme": "none"}, {"match": "*.0.mlp.down_proj.weight", "scheme": "none"}]
    source = write_compressed_tensors(tmp_path, INT4, plain)
    entries = run(source, tmp_path / "ours", calibrated(method, text, INT4))
    kept = {name for name, entry in entries.items() if "kept" in entry}
    rounded = {name for name, entry in entries.items() if entry.get("method") == method}
    assert kept | rounded == {name for name in entries if "_proj." in name} and not kept & rounded
    assert rounded == {name for name in entries if "self_attn" in name or name.endswith(".0.mlp.down_proj.weight")}
    ours, neutral = quantize.open_checkpoint(tmp_path / "ours"), quantize.open_checkpoint(tmp_path / "neutral")
    for name in kept:  # no factor of AWQ may have gone into a matrix that is only copied
        assert ours.load(name).tobytes() == neutral.load(name).tobytes()
        assert ours.load(f"{name}_scale").tobytes() == neutral.load(f"{name}_scale").tobytes()


def test_kept_weights_get_the_input_scales_that_calibration_finds(tmp_path: Path, text: Path) -> None:
    source = write_compressed_tensors(tmp_path, {"scheme": "fp8"})
    calibration = {"text": text, "num_samples": 4, "sequence_length": 64}
    linears = {"scheme": "fp8", "activations": "fp8"}
    recipe = Recipe.model_validate({"name": "static", "linears": linears, "calibration": calibration})
    entries = run(source, tmp_path / "ours", recipe)
    checkpoint = quantize.open_checkpoint(tmp_path / "ours")
    for name in (name for name in entries if "_proj." in name):
        assert (entries[name]["kept"], entries[name]["activations"]) == (True, {"scheme": "fp8", "scale": "static"})
        assert quantize.load_weight(checkpoint, name).input_scale > 0


def test_smoothed_weights_are_not_the_stored_ones(tmp_path: Path, text: Path) -> None:
    source = write_compressed_tensors(tmp_path, {"scheme": "int8"})
    calibration = {"text": text, "num_samples": 4, "sequence_length": 64}
    linears = {"scheme": "int8", "activations": "int8", "smoothing": 0.5}
    recipe = Recipe.model_validate({"name": "smooth", "linears": linears, "calibration": calibration})
    assert not any("kept" in entry for entry in run(source, tmp_path / "ours", recipe).values())
