"""ModelOpt's TensorRT-LLM checkpoints of a small model and ours, for two ranks: names, types, shapes and values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelopt_environment import CALIBRATION, run_modelopt
from safetensors import safe_open

import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.packing import pack_uint4
from quantize.quantized_tensor import FORMAT_VERSION, QUANT_METHOD
from quantize.recipe import Recipe
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from calibrated_llama import TOOLS, save_with_tokenizer, write_text

pytestmark = pytest.mark.integration

HEADS, KV_HEADS, HEAD_DIM, TP = 8, 2, 64, 2
FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8", "share_scale": True}
RECIPES: dict[str, dict[str, Any]] = {
    "fp8": {"linears": FP8, "kv_cache": "fp8"},
    "int8_sq": {"linears": {"scheme": "int8", "activations": "int8", "smoothing": 1.0, "fold_smoothing": False}},
    "nvfp4": {"linears": {"scheme": "nvfp4", "scale": "absmax", "activations": "nvfp4"}},
}
# They share the embeddings between ranks, and store keys' and values' scales beside the one of both.
OTHERWISE = ("vocab_embedding.weight", ".k_cache_scaling_factor", ".v_cache_scaling_factor")
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    save_with_tokenizer(path, hidden_size=256, intermediate_size=512, initializer_range=0.05, **heads)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def theirs(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_modelopt("export_unified.py", source, text, tmp_path_factory.mktemp("modelopt"), TOOLS)


def read(path: Path) -> tuple[list[Tensors], list[dict[str, Any]]]:
    """Of each rank the values, fp8 as bytes, and the types and shapes as the file says them; [] as [1]."""
    import torch

    values: list[Tensors] = []
    described: list[dict[str, Any]] = []
    for rank in range(TP):
        with safe_open(path / f"rank{rank}.safetensors", "pt") as file:
            names = [name for name in file.keys() if not name.endswith(OTHERWISE)]  # noqa: SIM118 - no mapping
            slices = {name: file.get_slice(name) for name in names}
            described.append({name: (part.get_dtype(), part.get_shape() or [1]) for name, part in slices.items()})
            tensors = {name: file.get_tensor(name) for name in names}
        values.append(
            {
                name: (tensor.view(torch.uint8) if "float8" in str(tensor.dtype) else tensor)
                .reshape(described[-1][name][1])
                .numpy()
                for name, tensor in tensors.items()
            }
        )
    return values, described


def ours(checkpoint: Path, output: Path) -> tuple[list[Tensors], list[dict[str, Any]]]:
    export_checkpoint(checkpoint, output, ExportOptions("trtllm", tp_size=TP, dtype="float16"))
    return read(output)


def quantization(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization"]
    found.pop("exclude_modules")
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_agree(source: Path, text: Path, theirs: Path, tmp_path: Path, name: str) -> None:
    data = {"name": "test", "embeddings": {"scheme": "none"}, **RECIPES[name]}
    recipe = Recipe.model_validate({**data, "calibration": {"text": text, **CALIBRATION}})
    quantize.quantize_checkpoint(source, tmp_path / "q", recipe, calibration_tools=TOOLS)
    found, described = ours(tmp_path / "q", tmp_path / "out")
    expected, described_there = read(theirs / name)
    assert described == described_there
    assert quantization(tmp_path / "out") == quantization(theirs / name)
    for rank, there in zip(found, expected, strict=True):
        for tensor, values in there.items():
            if tensor.endswith(("attention.qkv.weight", "dense.weight", "fc.weight", "gate.weight", "proj.weight")):
                # A scale that differs in its last bit moves a value on the border between two codes.
                assert (rank[tensor] != values).mean() < 3e-3, tensor
            elif values.dtype == np.uint8:  # NVFP4's scales of blocks
                assert (rank[tensor] != values).mean() < 3e-3, tensor
            else:  # two forward passes; factors in float16
                np.testing.assert_allclose(rank[tensor], values, rtol=1e-3, err_msg=tensor)


def test_int4_awq_agrees_when_the_scales_are_given(source: Path, theirs: Path, tmp_path: Path) -> None:
    expected, described_there = read(theirs / "int4_awq")
    found, described = ours(with_their_scales(source, expected, tmp_path / "q"), tmp_path / "out")
    assert quantization(tmp_path / "out") == quantization(theirs / "int4_awq")
    for rank, there, here, described_rank in zip(found, expected, described, described_there, strict=True):
        for tensor, values in there.items():
            if tensor == "lm_head.weight":  # they pad the vocabulary further
                continue
            assert here[tensor] == described_rank[tensor]
            if tensor.endswith("weight") and values.dtype == np.int8:
                assert (rank[tensor] != values).mean() < 3e-3, tensor  # factors in float16 move a few
            else:
                np.testing.assert_array_equal(rank[tensor], values, err_msg=tensor)


def with_their_scales(source: Path, ranks: list[Tensors], output: Path) -> Path:
    """A checkpoint of ours with ModelOpt's scales and factors given: only the rounding is left to do."""
    original = quantize.open_checkpoint(source)
    arrays: Tensors = {}
    entries: dict[str, Any] = {}
    for name in original.names():
        if not name.endswith("_proj.weight"):
            arrays[name] = original.load_float32(name)
            continue
        scales, factors = their_scales(ranks, name)
        steps = (original.load_float32(name) / factors).reshape(*scales.shape, -1) / scales[..., None]
        values = (np.clip(np.rint(steps), -8, 7) + 8).astype(np.uint8)
        arrays[name] = pack_uint4(values.reshape(original.info(name).shape))
        arrays[f"{name}_scale"] = scales
        arrays[name.replace(".weight", ".pre_quant_scale")] = factors
        entries[name] = {"scheme": "int4", "group_size": 128, "symmetric": True, "pre_quant_scale": True}
    output.mkdir()
    specs = [TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(output / "model.safetensors", specs) as writer:
        for spec in specs:
            writer.add(spec).write_rows(0, arrays[spec.name])
    section = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "tensors": entries}
    (output / "config.json").write_text(json.dumps({**original.config, "quantization_config": section}))
    return output


def their_scales(ranks: list[Tensors], weight: str) -> tuple[np.ndarray, np.ndarray]:
    """[out, groups] and [in] of one of our weights, put together from the ranks."""
    _, _, layer, _, linear, _ = weight.split(".")
    modules = {"o_proj": "attention.dense", "gate_proj": "mlp.fc", "up_proj": "mlp.gate", "down_proj": "mlp.proj"}
    module = f"transformer.layers.{layer}.{modules.get(linear, 'attention.qkv')}"
    scales = [rank[f"{module}.weights_scaling_factor"] for rank in ranks]
    factors = [rank[f"{module}.prequant_scaling_factor"].astype(np.float32) for rank in ranks]
    if linear in ("o_proj", "down_proj"):
        return np.concatenate(scales, axis=1), np.concatenate(factors)
    if linear in ("q_proj", "k_proj", "v_proj"):
        rows = [HEADS // TP * HEAD_DIM, (HEADS + KV_HEADS) // TP * HEAD_DIM]
        scales = [np.split(part, rows)["qkv".index(linear[0])] for part in scales]
    return np.concatenate(scales), factors[0]


@pytest.mark.parametrize("name", [*RECIPES, "int4_awq"])
def test_lint_finds_nothing_in_theirs(theirs: Path, name: str) -> None:
    assert lint_checkpoint(theirs / name, tp_size=TP, check_values=True) == []
