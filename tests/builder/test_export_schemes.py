"""Every scheme through the layouts of others: their own loader reads our weights, and lint finds nothing to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from safetensors import safe_open

import quantize
from plansmith_errors import ExportError
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.quantized_tensor import load_weight
from quantize.recipe import Recipe

NVFP4 = {"scheme": "nvfp4", "scale": "mse"}
STATIC_FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
SMOOTHED = {"scheme": "int8", "activations": "int8", "smoothing": 0.5}
BY_TOKEN = {"scheme": "int8", "activations": "int8", "activation_scale": "token"}
# Those that transformers can load on a CPU: it reads one layout per model, so none with several.
COMPRESSED_TENSORS: dict[str, dict[str, Any]] = {
    "fp8 static": {"linears": STATIC_FP8, "kv_cache": "fp8"},
    "fp8 block": {"linears": {"scheme": "fp8", "granularity": "block"}},
    "int8 static, smoothed": {"linears": SMOOTHED},
    "int8 by token": {"linears": BY_TOKEN},
    "nvfp4": {"linears": {**NVFP4, "activations": "nvfp4"}},
    "nvfp4 weights": {"linears": NVFP4},
    "mxfp4": {"linears": {"scheme": "mxfp4"}},
}
MODELOPT: dict[str, tuple[dict[str, Any], str]] = {
    "fp8 static": ({"linears": STATIC_FP8, "kv_cache": "fp8"}, "FP8"),
    "fp8 block": ({"linears": {"scheme": "fp8", "granularity": "block"}}, "fp8_pb_wo"),
    "w4a8": ({"linears": {"scheme": "int4", "method": "awq", "activations": "fp8"}}, "W4A8_AWQ"),
    "nvfp4": ({"linears": {**NVFP4, "activations": "nvfp4"}}, "NVFP4"),
    "mixed": (
        {"linears": STATIC_FP8, "overrides": [{"match": "*.mlp.*", "scheme": "int4", "group_size": 64}]},
        "MIXED_PRECISION",
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    save_with_tokenizer(path, hidden_size=256, intermediate_size=384)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def quantized(source: Path, output: Path, text: Path, recipe: dict[str, Any]) -> quantize.Checkpoint:
    data = Recipe.model_validate({"name": "test", **recipe})
    if data.is_calibrated:
        settings = {"text": text, "num_samples": 4, "sequence_length": 64}
        data = Recipe.model_validate({"name": "test", **recipe, "calibration": settings})
    quantize.quantize_checkpoint(source, output, data, calibration_tools=TOOLS)
    return quantize.open_checkpoint(output)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # what it says is what is wanted
@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_compressed_tensors_loader_reads_our_weights(source: Path, text: Path, tmp_path: Path, name: str) -> None:
    ours = quantized(source, tmp_path / "q", text, COMPRESSED_TENSORS[name])
    export_checkpoint(tmp_path / "q", tmp_path / "out", ExportOptions("compressed-tensors", dtype="float32"))
    assert lint_checkpoint(tmp_path / "out", check_values=True) == []
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=settings
    )
    found = dict(model.named_parameters())
    for weight in (stored for stored in ours.names() if stored.endswith("_proj.weight")):
        expected = load_weight(ours, weight).dequantize()
        # The library multiplies nvfp4's two scales in bfloat16.
        rtol = 4e-3 if name.startswith("nvfp4") else 2e-6
        np.testing.assert_allclose(found[weight].detach().numpy(), expected, rtol=rtol, atol=1e-7, err_msg=weight)


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_layout_says_what_it_holds(source: Path, text: Path, tmp_path: Path, name: str) -> None:
    recipe, algorithm = MODELOPT[name]
    ours = quantized(source, tmp_path / "q", text, recipe)
    export_checkpoint(tmp_path / "q", tmp_path / "out", ExportOptions("modelopt", dtype="float16"))
    assert lint_checkpoint(tmp_path / "out", check_values=True) == []
    config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == algorithm
    assert config["kv_cache_quant_algo"] == ("FP8" if "kv_cache" in recipe else None)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        names = set(file.keys())
    down = "model.layers.1.mlp.down_proj"
    weight = load_weight(ours, f"{down}.weight")
    assert (f"{down}.input_scale" in names) == (weight.activations is not None)
    if "kv_cache" in recipe:
        assert "model.layers.0.self_attn.k_proj.k_scale" in names
    if name == "mixed":
        layers = config["quantized_layers"]
        assert layers[down] == {
            "quant_algo": "W4A16_AWQ",
            "group_size": 64,
            "has_zero_point": False,
            "pre_quant_scale": False,
        }
        assert layers["model.layers.1.self_attn.q_proj"] == {"quant_algo": "FP8"}
        assert len(layers) == 14


@pytest.mark.parametrize(
    ("recipe", "layout", "consumer", "message"),
    [
        ({"linears": {**SMOOTHED, "fold_smoothing": False}}, "compressed-tensors", None, "take fold_smoothing true"),
        ({"linears": SMOOTHED}, "modelopt", None, "W8A8_SQ_PER_CHANNEL; take the format compressed-tensors"),
        ({"linears": NVFP4}, "modelopt", None, "has no name for it"),
        ({"linears": {"scheme": "fp8", "granularity": "tensor"}}, "compressed-tensors", None, "has no such scheme"),
        ({"linears": STATIC_FP8}, "compressed-tensors", "tensorrt-llm", "take the format modelopt"),
        ({"linears": {"scheme": "fp8"}, "kv_cache": "int8"}, "modelopt", None, "fp8 KV cache, found int8"),
    ],
)
def test_what_would_be_refused_or_misread_is_refused_here(
    source: Path, text: Path, tmp_path: Path, recipe: dict[str, Any], layout: Any, consumer: Any, message: str
) -> None:
    quantized(source, tmp_path / "q", text, recipe)
    with pytest.raises(ExportError) as error:
        export_checkpoint(tmp_path / "q", tmp_path / "out", ExportOptions(layout, consumer))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_static_scales_that_were_never_calibrated_are_named(source: Path, text: Path, tmp_path: Path) -> None:
    from quantize.safetensors_file import SafetensorsFile

    quantized(source, tmp_path / "q", text, {"linears": STATIC_FP8})
    path = tmp_path / "q" / "model.safetensors"
    file = SafetensorsFile(path)
    name = "model.layers.1.mlp.up_proj.input_scale"
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    data = bytearray(path.read_bytes())
    begin = 8 + header_bytes + file.tensors[name].begin
    data[begin : begin + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(ExportError, match=r"static scales of model\.layers\.1\.mlp\.up_proj are no positive numbers"):
        export_checkpoint(tmp_path / "q", tmp_path / "out", ExportOptions("modelopt"))
