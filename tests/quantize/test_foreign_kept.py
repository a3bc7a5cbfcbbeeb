"""A model that is stored as the recipe asks already is not rounded a second time; one that is not, is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_models import RECIPES, dequantized, write_quantized
from foreign_models import DOWN, LINEARS, awq, fp8, gptq, modelopt_fp4, modelopt_int4, modelopt_int8, write, write_model
from tiny_mixtures import mixture_config, mixture_weights

import quantize
from plansmith_errors import CheckpointError, QuantizeError
from quantize.export import ExportOptions, export_checkpoint
from quantize.foreign import recognize
from quantize.lint import lint_checkpoint
from quantize.recipe import Recipe

WEIGHT = f"{DOWN}.weight"
INT4 = {"scheme": "int4", "group_size": 32}


def run(source: Path, output: Path, linears: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Quantize, and return the entries of config.json."""
    recipe = Recipe.model_validate({"name": "test", "linears": linears, **changes})
    quantize.quantize_checkpoint(source, output, recipe)
    tensors: dict[str, Any] = json.loads((output / "config.json").read_text())["quantization_config"]["tensors"]
    return tensors


def linears_of(entries: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for name, entry in entries.items() if name.endswith("_proj.weight")]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("int4", "compressed-tensors"),
        ("int4-128", "compressed-tensors"),
        ("int4-asym", "compressed-tensors"),
        ("int8", "compressed-tensors"),
        ("fp8", "compressed-tensors"),
        ("int4", "modelopt"),
        ("int4-128", "modelopt"),
        ("fp8", "modelopt"),
    ],
)
def test_our_exports_come_back_bit_for_bit(tmp_path: Path, recipe: str, layout: Any) -> None:
    neutral = write_quantized(tmp_path / "q", recipe)
    # compressed-tensors' scales have the type of the floats beside; ModelOpt's are float32 always
    dtype: Any = "float32" if layout == "compressed-tensors" else "float16"
    export_checkpoint(neutral, tmp_path / "export", ExportOptions(layout, dtype=dtype))
    exported = recognize.dequantized(quantize.open_checkpoint(tmp_path / "export"))
    for name in exported.names():
        rounded = 0.0 if dtype == "float32" or name.endswith("_proj.weight") else 1e-3  # the embeddings are int8
        np.testing.assert_allclose(exported.load_float32(name), dequantized(neutral, name), rtol=rounded)

    entries = run(tmp_path / "export", tmp_path / "again", RECIPES[recipe]["linears"])
    for entry in linears_of(entries):
        assert (entry["kept"], entry["relative_error"]) == (True, 0)
    ours, again = quantize.open_checkpoint(neutral), quantize.open_checkpoint(tmp_path / "again")
    for name in ours.names():
        if "_proj.weight" in name:
            assert ours.load(name).dtype == again.load(name).dtype
            assert ours.load(name).tobytes() == again.load(name).tobytes()


SOURCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gptq": (*gptq(), {**INT4, "symmetric": True}),
    "gptq-asymmetric": (*gptq(symmetric=False), {**INT4, "symmetric": False}),
    "gptq-channel": (*gptq(4, -1), {**INT4, "group_size": "channel"}),
    "awq": (*awq(), {**INT4, "symmetric": False}),
    "fp8-block": (
        fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"scheme": "fp8", "granularity": "block"},
    ),
    "fp8-tensor": (
        fp8("scalar"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"scheme": "fp8", "granularity": "tensor"},
    ),
    "nvfp4": (modelopt_fp4("nvfp4"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"scheme": "nvfp4"}),
    "mxfp4": (modelopt_fp4("mxfp4"), {"quant_method": "modelopt", "quant_algo": "MXFP4"}, {"scheme": "mxfp4"}),
    "int4": (modelopt_int4(), {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, INT4),
}


@pytest.mark.parametrize("source", SOURCES)
def test_values_and_scales_are_kept(tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pack, config, linears = SOURCES[source]
    meant = write_model(tmp_path / "in", pack, config)
    entries = run(tmp_path / "in", tmp_path / "out", linears)
    assert all(entry["kept"] for entry in linears_of(entries))
    counts = re.findall(rf"(\d+) matrices are {linears['scheme']}", caplog.text)  # one line for each group size
    assert sum(map(int, counts)) == len(LINEARS)
    for name, expected in meant.items():
        found = quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), name).dequantize()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("source", SOURCES)
def test_recipe_none_gives_the_plain_model(tmp_path: Path, source: str) -> None:
    pack, config, _ = SOURCES[source]
    meant = write_model(tmp_path / "in", pack, config)
    quantize.quantize_checkpoint(tmp_path / "in", tmp_path / "out", quantize.load_recipe("none"))
    for name, expected in meant.items():
        found = quantize.open_checkpoint(tmp_path / "out").load(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_another_scheme_is_rounded_from_the_dequantized_values(tmp_path: Path) -> None:
    pack, config = gptq()
    write_model(tmp_path / "in", pack, config)
    for linears in ({"scheme": "int8"}, {**INT4, "symmetric": False}, {"scheme": "nvfp4"}):
        entries = run(tmp_path / "in", tmp_path / f"out-{linears['scheme']}", linears)
        assert not any("kept" in entry for entry in linears_of(entries))
    origin = json.loads((tmp_path / "out-int8" / "config.json").read_text())["quantization_config"]["source"]["origin"]
    assert origin == "dequantized from GPTQ int4 g32 (safetensors)"


def refused_to_keep(tmp_path: Path, linears: dict[str, Any]) -> None:
    entries = run(tmp_path / "in", tmp_path / "out", linears)
    assert not any("kept" in entry for entry in linears_of(entries))


def test_act_order_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack, config = gptq(act_order=True)
    write_model(tmp_path / "in", pack, config)
    refused_to_keep(tmp_path, INT4)
    assert "7 matrices have the scheme that is asked for but are rounded again: columns of a group" in caplog.text


def test_scaled_inputs_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "in", modelopt_int8, {"quant_method": "modelopt", "quant_algo": "W8A8_SQ"})
    refused_to_keep(tmp_path, {"scheme": "int8"})
    assert "rounded again: their inputs are scaled (pre_quant_scale)" in caplog.text


def test_scales_of_zero_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack, config = gptq()

    def with_zero(module: str, weight: np.ndarray, rng: np.random.Generator) -> Any:
        parts, meant = pack(module, weight, rng)
        parts["scales"] = np.array(parts["scales"])
        parts["scales"][0, 0] = 0
        return parts, meant

    write_model(tmp_path / "in", with_zero, config)
    refused_to_keep(tmp_path, {**INT4, "symmetric": True})
    assert "rounded again: some scales are zero, negative or not finite" in caplog.text


def test_nvfp4_of_fused_matrices_with_different_scales_is_rounded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack = modelopt_fp4("nvfp4")

    def differing(module: str, weight: np.ndarray, rng: np.random.Generator) -> Any:
        parts, meant = pack(module, weight, rng)
        if module.endswith("v_proj"):
            parts["weight_scale_2"] = np.float32(0.001)
        return parts, meant

    write_model(tmp_path / "in", differing, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    entries = run(tmp_path / "in", tmp_path / "out", {"scheme": "nvfp4"})
    kept = {name.split(".")[-2] for name, entry in entries.items() if "kept" in entry}
    assert kept == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "3 matrices have the scheme" in caplog.text


def test_a_calibrated_recipe_has_nothing_to_do_where_all_is_kept(tmp_path: Path) -> None:
    pack, config = gptq()
    write_model(tmp_path / "in", pack, config)
    entries = run(tmp_path / "in", tmp_path / "out", {**INT4, "symmetric": True, "method": "gptq"})
    assert all(entry["kept"] and "method" not in entry for entry in linears_of(entries))


def test_rotated_weights_are_not_the_stored_ones(tmp_path: Path) -> None:
    neutral = write_quantized(tmp_path / "q", "int4")
    export_checkpoint(neutral, tmp_path / "in", ExportOptions("compressed-tensors"))
    entries = run(tmp_path / "in", tmp_path / "out", RECIPES["int4"]["linears"], rotations=["r1"])
    assert not any("kept" in entry for entry in linears_of(entries))


def test_damaged_scales_are_one_clear_line(tmp_path: Path) -> None:
    def damaged(module: str, weight: np.ndarray, rng: np.random.Generator) -> Any:
        parts, meant = pack(module, weight, rng)
        parts["scales"] = np.array(parts["scales"])
        parts["scales"][0, 3] = np.inf
        return parts, meant

    pack, config = gptq()
    write_model(tmp_path / "in", damaged, config)
    for number, linears in enumerate(({"scheme": "none"}, {"scheme": "int8"}, {**INT4, "symmetric": True})):
        with pytest.raises(QuantizeError, match="a value in row 3 is not finite; the source is damaged"):
            run(tmp_path / "in", tmp_path / f"out{number}", linears)


def test_other_verbs_say_how_to_read_it(tmp_path: Path) -> None:
    pack, config = gptq()
    write_model(tmp_path / "in", pack, config)
    with pytest.raises(CheckpointError, match=r"is quantized by 'gptq' .* plansmith quantize --recipe none"):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "in"), "model.norm.weight")


def test_a_stopped_run_goes_on_after_what_was_kept(tmp_path: Path) -> None:
    pack, config = gptq()
    write_model(tmp_path / "in", pack, config)
    recipe = Recipe.model_validate({"name": "test", "linears": {**INT4, "symmetric": True}})
    resume = quantize.Resume(tmp_path / "state", "fingerprint")

    def stop(done: int, total: int, name: str) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_checkpoint(tmp_path / "in", tmp_path / "out", recipe, progress=stop, resume=resume)
    quantize.quantize_checkpoint(tmp_path / "in", tmp_path / "out", recipe, resume=resume)
    quantize.quantize_checkpoint(tmp_path / "in", tmp_path / "whole", recipe)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_kept_like_other_linears(tmp_path: Path, model_type: str) -> None:
    pack, quantization = gptq()
    rng = np.random.default_rng(5)
    stored: dict[str, Any] = {}
    meant = mixture_weights(model_type)
    for name, weight in list(meant.items()):
        if weight.ndim == 1 or ".gate.weight" in name or "layers" not in name:
            stored[name] = weight
            continue
        module = name.removesuffix(".weight")
        parts, meant[name] = pack(module, weight, rng)
        stored |= {f"{module}.{kind}": value for kind, value in parts.items()}
    write(tmp_path / "in", stored, mixture_config(model_type, quantization_config=quantization))
    assert lint_checkpoint(tmp_path / "in", check_values=True) == []
    entries = run(tmp_path / "in", tmp_path / "out", {**INT4, "symmetric": True})
    assert {name for name, entry in entries.items() if "kept" in entry} == {
        name for name in meant if f"{name.removesuffix('.weight')}.qweight" in stored
    }
    for name, expected in meant.items():
        found = quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), name).dequantize()
        np.testing.assert_array_equal(found, expected)
