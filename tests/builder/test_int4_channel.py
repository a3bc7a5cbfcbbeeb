"""INT4 with one scale per output channel: stored bytes by the written rules, and who reads or refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text
from safetensors.numpy import load_file
from tiny_models import random_ids, run_mixed

import builder
import quantize
from builder.targets.cpu.settings import compile_properties
from plansmith_errors import CheckpointError, ConfigError, ExportError, QuantizeError
from quantize.lint import lint_checkpoint
from quantize.quantized_tensor import load_weight
from quantize.recipe import Recipe

DOWN, GATE = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.gate_proj.weight"
CHANNEL: dict[str, Any] = {"scheme": "int4", "group_size": "channel"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path)
    return path


def rounded(source: Path, output: Path, **rule: Any) -> quantize.Checkpoint:
    recipe = Recipe.model_validate({"name": "test", "linears": {**CHANNEL, **rule}})
    quantize.quantize_checkpoint(source, output, recipe)
    return quantize.open_checkpoint(output)


@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_bytes_read_by_the_written_rules_are_within_half_a_step(
    tmp_path: Path, source: Path, symmetric: bool
) -> None:
    checkpoint = rounded(source, tmp_path / "out", symmetric=symmetric)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name in (DOWN, GATE):
        original = quantize.open_checkpoint(source).load_float32(name)
        rows, columns = original.shape
        packed, scales = stored[name], stored[f"{name}_scale"].astype(np.float32)
        assert scales.shape == (rows, 1)
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns).astype(np.float32)
        zeros = np.float32(8) if symmetric else stored[f"{name}_zero_point"].astype(np.float32)
        read = (values - zeros) * scales
        # The last step of a range is cut off by what float16 rounds away of the scale.
        assert (np.abs(read - original) <= 0.51 * scales).all()
        np.testing.assert_array_equal(load_weight(checkpoint, name).dequantize(), read)
        assert checkpoint.config["quantization_config"]["tensors"][name]["group_size"] == columns
    assert lint_checkpoint(tmp_path / "out", check_values=True) == []


def test_kernels_and_numpy_store_the_same(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantize import chunk_rounding

    rounded(source, tmp_path / "first", scale="mse")
    monkeypatch.setattr(chunk_rounding, "native_kernels", lambda: None)
    rounded(source, tmp_path / "second", scale="mse")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


@pytest.mark.parametrize("method", ["importance", "awq", "gptq"])
def test_calibrated_methods_have_one_scale_for_each_row(tmp_path: Path, source: Path, method: str) -> None:
    text = write_text(tmp_path / "words.txt")
    recipe = calibrated(method, text, {"group_size": "channel"})
    quantize.quantize_checkpoint(source, tmp_path / "out", recipe, calibration_tools=TOOLS)
    checkpoint = quantize.open_checkpoint(tmp_path / "out")
    weight = load_weight(checkpoint, DOWN)
    assert weight.scales is not None and weight.scales.shape == (weight.shape[0], 1)
    assert weight.group_size == weight.shape[1]
    if method == "gptq":  # of the outputs, not of the weights
        rounded(source, tmp_path / "rtn")
        expected = logits(source)
        errors = [np.linalg.norm(logits(tmp_path / name) - expected) for name in ("out", "rtn")]
        assert errors[0] < errors[1]


def logits(path: Path) -> np.ndarray:
    return run_mixed(builder.load_reference(path, num_blocks=12), random_ids())


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_cpu_engine_computes_what_the_reference_does(tmp_path: Path, source: Path, symmetric: bool) -> None:
    rounded(source, tmp_path / "out", symmetric=symmetric)
    options = builder.BuildOptions(precision="exact")
    (tmp_path / "engine").mkdir()
    builder.build_engine(tmp_path / "out", tmp_path / "engine", options, plansmith_version="0")
    found = run_mixed(builder.load_engine(tmp_path / "engine", num_blocks=12, num_threads=1), random_ids())
    assert np.abs(found - logits(tmp_path / "out")).max() < 1e-3


@pytest.mark.parametrize(("groups", "expected"), [({576}, "64"), ({4096, 11008}, "128"), ({192}, "192"), ({98}, "0")])
def test_groups_of_activations_lie_within_rows(groups: set[int], expected: str) -> None:
    assert compile_properties("fast", groups)["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == expected


def test_a_row_that_cannot_be_packed_in_pairs_is_refused(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model", intermediate_size=97)
    with pytest.raises(QuantizeError, match=r"97 input columns, an odd number.*int8 or fp8 through overrides"):
        rounded(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_group_than_the_row_is_still_refused(tmp_path: Path, source: Path) -> None:
    checkpoint = rounded(source, tmp_path / "out")
    checkpoint.config["quantization_config"]["tensors"][DOWN]["group_size"] = 48
    with pytest.raises(CheckpointError, match=r"groups of 48, expected groups of 32, 64, 128, 192.*or all of them"):
        load_weight(checkpoint, DOWN)


def test_the_group_belongs_to_int4(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("{name: test, linears: {scheme: int8, group_size: channel}}")
    with pytest.raises(ConfigError, match="group_size belongs to the scheme int4"):
        quantize.load_recipe(str(path))


def test_exports_refuse_it(tmp_path: Path, source: Path) -> None:
    from quantize.export import ExportOptions, export_checkpoint

    rounded(source, tmp_path / "out")
    options = ExportOptions(format="compressed-tensors", consumer="vllm", dtype="bfloat16")
    with pytest.raises(ExportError, match="groups of"):
        export_checkpoint(tmp_path / "out", tmp_path / "exported", options)
    assert not (tmp_path / "exported").exists()
