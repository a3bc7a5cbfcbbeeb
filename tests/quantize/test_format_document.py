"""The worked examples of docs/quantized-checkpoint.md hold: for the writer, and for the reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import tiny_config, tiny_weights, write_safetensors

import quantize
from quantize.quantized_tensor import QuantizedTensor
from quantize.recipe import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "quantized-checkpoint.md"
EXAMPLES: list[dict[str, Any]] = [
    json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
]
E4M3 = ml_dtypes.float8_e4m3fn
VALUE_DTYPES = {"int8": np.int8, "fp8": E4M3, "mxfp8": E4M3}  # the others: uint8
SCALE_DTYPES = {"int4": np.float16, "nvfp4": E4M3, "mxfp4": np.uint8, "mxfp8": np.uint8}  # the others: float32
BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
each_example = pytest.mark.parametrize(
    "example",
    EXAMPLES,
    ids=lambda example: "-".join(str(example[key]) for key in ("scheme", "symmetric", "granularity") if key in example),
)


def from_hex(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype)[None]


@each_example
def test_bytes_mean_what_the_document_says(example: dict[str, Any]) -> None:
    scheme, scales = (
        example["scheme"],
        from_hex(example["weight_scale"], SCALE_DTYPES.get(example["scheme"], np.float32)),
    )
    tensor = QuantizedTensor(
        scheme,
        (1, len(example["row"])),
        from_hex(example["weight"], VALUE_DTYPES.get(scheme, np.uint8)),
        scales.reshape(()) if example.get("granularity") == "tensor" else scales,
        from_hex(example["weight_zero_point"], np.uint8) if "weight_zero_point" in example else None,
        example.get("group_size", BLOCKS.get(scheme)),
        from_hex(example["weight_scale_2"], np.float32).reshape(()) if "weight_scale_2" in example else None,
    )
    np.testing.assert_array_equal(tensor.dequantize()[0, :4], np.float32(example["first_dequantized"]))


@each_example
def test_quantizing_the_row_gives_the_bytes(tmp_path: Path, example: dict[str, Any]) -> None:
    """Through the whole pipeline: the row, repeated, is the first row of a matrix of a model."""
    weights = tiny_weights()
    name = "model.layers.0.mlp.up_proj.weight"
    repeats = -(-64 // len(example["row"]))
    weights[name][0] = np.tile(np.float32(example["row"]), repeats)
    rule = {key: example[key] for key in ("scheme", "group_size", "scale", "granularity") if key in example}
    if example["scheme"] == "int4":
        rule["symmetric"] = example["symmetric"]
    recipe = Recipe.model_validate({"name": "example", "linears": rule})
    source = write_safetensors(tmp_path / "source", weights, tiny_config())
    quantize.quantize_checkpoint(source, tmp_path / "out", recipe)
    checkpoint = quantize.open_checkpoint(tmp_path / "out")
    assert checkpoint.load(name)[0].tobytes() == bytes.fromhex(example["weight"]) * repeats
    scales = checkpoint.load(f"{name}_scale")
    assert scales.reshape(-1)[0].tobytes() == bytes.fromhex(example["weight_scale"])
    if "weight_scale_2" in example:
        assert checkpoint.load(f"{name}_scale_2").tobytes() == bytes.fromhex(example["weight_scale_2"])
    if "weight_zero_point" in example:
        assert checkpoint.load(f"{name}_zero_point")[0, 0] == int(example["weight_zero_point"], 16)
    assert (f"{name}_zero_point" in checkpoint) == ("weight_zero_point" in example)


def test_the_document_has_an_example_of_each_scheme() -> None:
    schemes = ["int4", "int4", "int8", "fp8", "fp8", "fp8", "nvfp4", "mxfp4", "mxfp8"]
    assert [example["scheme"] for example in EXAMPLES] == schemes
