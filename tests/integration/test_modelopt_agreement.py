"""ModelOpt's unified export of a small model and ours, tensor by tensor: names, types, shapes and values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelopt_environment import CALIBRATION, run_modelopt
from safetensors import safe_open

import builder
import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.packing import pack_uint4
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from calibrated_llama import TOOLS, save_with_tokenizer, write_text

pytestmark = pytest.mark.integration

FP8 = {"linears": {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}, "kv_cache": "fp8"}
INT8_SQ = {"linears": {"scheme": "int8", "activations": "int8", "smoothing": 1.0, "fold_smoothing": False}}
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    save_with_tokenizer(path, hidden_size=128, intermediate_size=256, initializer_range=0.05)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def theirs(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ModelOpt's exports."""
    return run_modelopt("export.py", source, text, tmp_path_factory.mktemp("modelopt"), TOOLS)


def read(path: Path) -> tuple[Tensors, dict[str, tuple[str, list[int]]]]:
    """Values, fp8 as bytes, and the types and shapes as the file says them."""
    import torch

    values, described = {}, {}
    with safe_open(path / "model.safetensors", "pt") as file:
        for name in list(file.keys()):  # the file itself cannot be iterated
            described[name] = (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
            tensor = file.get_tensor(name)
            values[name] = tensor.view(torch.uint8).numpy() if "float8" in str(tensor.dtype) else tensor.numpy()
    return values, described


def export(checkpoint: Path, output: Path) -> Path:
    export_checkpoint(checkpoint, output, ExportOptions("modelopt", "modelopt", dtype="float32"))
    return output


def quantized(source: Path, output: Path, text: Path, recipe: dict[str, Any]) -> Path:
    data = {"name": "test", **recipe, "calibration": {"text": text, **CALIBRATION}}
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(data), calibration_tools=TOOLS)
    return output


def neutral_int4(source: Path, theirs: Tensors, output: Path) -> Path:
    """A quantized checkpoint of ours with ModelOpt's scales and factors given: only the rounding is left to do."""
    import json

    from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

    original = quantize.open_checkpoint(source)
    arrays: Tensors = {}
    entries: dict[str, Any] = {}
    for name in original.names():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            arrays[name] = theirs[name] if "norm" in name else original.load_float32(name)
            continue
        factors = _factors(original, theirs, module)
        scales = theirs[f"{module}.weight_scale"]
        weights = original.load_float32(name) / factors
        steps = weights.reshape(*scales.shape, -1) / scales[..., None]
        arrays[name] = pack_uint4((np.clip(np.rint(steps), -8, 7) + 8).astype(np.uint8).reshape(weights.shape))
        arrays[f"{name}_scale"] = scales
        entries[name] = {"scheme": "int4", "group_size": 128, "symmetric": True}
        if f"{module}.pre_quant_scale" in theirs:
            arrays[f"{module}.pre_quant_scale"] = theirs[f"{module}.pre_quant_scale"]
            entries[name]["pre_quant_scale"] = True
    output.mkdir()
    specs = [TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(output / "model.safetensors", specs) as writer:
        for spec in specs:
            writer.add(spec).write_rows(0, arrays[spec.name])
    section = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "tensors": entries}
    (output / "config.json").write_text(json.dumps({**original.config, "quantization_config": section}))
    return output


def _factors(original: quantize.Checkpoint, theirs: Tensors, module: str) -> np.ndarray:
    """What ModelOpt multiplies the linear's inputs with: stored, or in the norm before."""
    if f"{module}.pre_quant_scale" in theirs:
        return theirs[f"{module}.pre_quant_scale"]
    layer = ".".join(module.split(".")[:3])
    norm = f"{layer}.{'post_attention_layernorm' if '.mlp.' in module else 'input_layernorm'}.weight"
    return theirs[norm] / original.load_float32(norm)


def test_fp8_and_the_scales_of_the_kv_cache_agree(source: Path, text: Path, theirs: Path, tmp_path: Path) -> None:
    expected, described = read(theirs / "fp8")
    ours, found = read(export(quantized(source, tmp_path / "q", text, FP8), tmp_path / "out"))
    assert found == described
    assert any(name.endswith("k_scale") for name in found) and any(name.endswith("v_scale") for name in found)
    for name, values in expected.items():
        if name.endswith((".input_scale", ".k_scale", ".v_scale")):  # two forward passes
            np.testing.assert_allclose(ours[name], values, rtol=1e-4, err_msg=name)
        elif name.endswith("_proj.weight"):
            # A scale that differs in its last bit moves a value on the border between two codes.
            assert (ours[name] != values).mean() < 1e-3, name
        else:
            np.testing.assert_allclose(ours[name], values, rtol=1e-6, err_msg=name)


def test_int8_smoothquant_agrees(source: Path, text: Path, theirs: Path, tmp_path: Path) -> None:
    """ModelOpt's alpha is 1: all of the inputs' range moves into the weights."""
    expected, described = read(theirs / "int8_sq")
    ours, found = read(export(quantized(source, tmp_path / "q", text, INT8_SQ), tmp_path / "out"))
    assert found == described
    for name, values in expected.items():
        if name.endswith("_proj.weight"):
            difference = np.abs(ours[name].astype(np.int16) - values)
            assert difference.max() <= 1 and (difference > 0).mean() < 2e-3, name
        else:
            np.testing.assert_allclose(ours[name], values, rtol=2e-4, err_msg=name)


def test_int4_awq_agrees_when_the_scales_are_given(source: Path, theirs: Path, tmp_path: Path) -> None:
    expected, described = read(theirs / "int4_awq")
    ours, found = read(export(neutral_int4(source, expected, tmp_path / "q"), tmp_path / "out"))
    assert found == described
    for name, values in expected.items():
        if name.endswith("_proj.weight"):
            # Factors that went into a norm come back from it with a rounding error; ties may fall the other way.
            assert (ours[name] != values).mean() < 2e-3, name
        else:
            np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_the_reference_reads_what_was_compared(source: Path, theirs: Path, tmp_path: Path) -> None:
    """The checkpoint of the INT4 test is a real one: its logits are near the model's."""
    from tiny_models import random_ids, run_mixed

    expected, _ = read(theirs / "int4_awq")
    path = neutral_int4(source, expected, tmp_path / "q")
    ids = random_ids(2, 40)
    original, found = (run_mixed(builder.load_reference(at, num_blocks=8), ids) for at in (source, path))
    assert np.linalg.norm(found - original) < 0.6 * np.linalg.norm(original)
