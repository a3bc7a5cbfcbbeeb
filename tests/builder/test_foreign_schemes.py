"""Every scheme that is exported, out to another tool's layout and back: the same values, and kept as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text

import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.export.options import Consumer, Format
from quantize.foreign.recognize import dequantized
from quantize.recipe import Recipe

INT4 = {"scheme": "int4", "group_size": 64}
ASYMMETRIC = {"scheme": "int4", "group_size": 32, "symmetric": False}
INT8 = {"scheme": "int8"}
STATIC_INT8 = {**INT8, "activations": "int8"}
FP8 = {"scheme": "fp8"}
STATIC_FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
FP8_BLOCK = {"scheme": "fp8", "granularity": "block"}
NVFP4 = {"scheme": "nvfp4"}
STATIC_NVFP4 = {**NVFP4, "activations": "nvfp4"}
MXFP4, MXFP8 = {"scheme": "mxfp4"}, {"scheme": "mxfp8"}
W4A8 = {**INT4, "activations": "fp8"}
COMPRESSED_TENSORS = (INT4, ASYMMETRIC, INT8, STATIC_INT8, FP8, STATIC_FP8, FP8_BLOCK, NVFP4, STATIC_NVFP4, MXFP4)
MODELOPT = (INT4, W4A8, INT8, STATIC_INT8, FP8, STATIC_FP8, FP8_BLOCK, STATIC_NVFP4, MXFP4, MXFP8)
CASES: list[tuple[Format, Consumer, dict[str, Any]]] = [
    *(("compressed-tensors", "vllm", linears) for linears in COMPRESSED_TENSORS),
    *(("modelopt", "modelopt", linears) for linears in MODELOPT),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    save_with_tokenizer(path, hidden_size=256, intermediate_size=384)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def run(source: Path, output: Path, text: Path, linears: dict[str, Any], **changes: Any) -> quantize.Checkpoint:
    data = {"name": "test", "linears": linears, **changes}
    if Recipe.model_validate(data).is_calibrated:
        data["calibration"] = {"text": text, "num_samples": 2, "sequence_length": 32}
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(data), calibration_tools=TOOLS)
    return quantize.open_checkpoint(output)


def linears_of(checkpoint: quantize.Checkpoint) -> list[str]:
    return [name for name in checkpoint.names() if name.endswith("_proj.weight")]


def export(neutral: Path, output: Path, layout: Format, consumer: Consumer) -> quantize.Checkpoint:
    # compressed-tensors' scales of integers have the type of the floats beside; ModelOpt's are float32 always
    dtype: Any = "float32" if layout == "compressed-tensors" else "float16"
    export_checkpoint(neutral, output, ExportOptions(layout, consumer, dtype=dtype))
    return dequantized(quantize.open_checkpoint(output))


@pytest.mark.parametrize(("layout", "consumer", "linears"), CASES)
def test_out_and_back(
    source: Path, text: Path, tmp_path: Path, layout: Format, consumer: Consumer, linears: dict[str, Any]
) -> None:
    neutral = run(source, tmp_path / "q", text, linears)
    exported = export(tmp_path / "q", tmp_path / "export", layout, consumer)
    kept = run(tmp_path / "export", tmp_path / "again", text, linears)
    # A reciprocal of a reciprocal may differ in its last digit.
    rtol = 2e-7 if (layout, linears["scheme"]) == ("compressed-tensors", "nvfp4") else 0.0
    entries = kept.config["quantization_config"]["tensors"]
    for name in linears_of(neutral):
        expected = quantize.load_weight(neutral, name)
        np.testing.assert_allclose(exported.load_float32(name), expected.dequantize(), rtol=rtol)
        assert entries[name]["kept"]
        again = quantize.load_weight(kept, name)
        assert again.values.tobytes() == expected.values.tobytes()
        assert (again.scales.dtype, again.scales.tobytes()) == (expected.scales.dtype, expected.scales.tobytes())
        assert again.activations == expected.activations


def test_factors_of_the_inputs_are_part_of_what_is_read(source: Path, text: Path, tmp_path: Path) -> None:
    smoothed = {**STATIC_INT8, "smoothing": 0.5, "fold_smoothing": False}
    neutral = run(source, tmp_path / "q", text, smoothed, kv_cache="fp8")
    exported = export(tmp_path / "q", tmp_path / "export", "modelopt", "modelopt")
    for name in linears_of(neutral):
        np.testing.assert_array_equal(exported.load_float32(name), quantize.load_weight(neutral, name).effective())


def test_several_schemes_in_one_model(source: Path, text: Path, tmp_path: Path) -> None:
    mixed = [{"match": "*.mlp.*", **INT4}]
    run(source, tmp_path / "q", text, STATIC_FP8, overrides=mixed)
    exported = export(tmp_path / "q", tmp_path / "export", "modelopt", "modelopt")
    assert exported.origin.startswith("dequantized from ModelOpt int4 g64 and fp8 per tensor")
    run(tmp_path / "export", tmp_path / "again", text, STATIC_FP8, overrides=mixed)
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert all(entry["kept"] for name, entry in config["tensors"].items() if name.endswith("_proj.weight"))
