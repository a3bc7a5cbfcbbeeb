"""Models that other tools quantized: by the written rules of their formats, every value is what the file means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from foreign_models import (
    DOWN,
    LINEARS,
    Pack,
    awq,
    fp8,
    gptq,
    modelopt_fp4,
    modelopt_int4,
    modelopt_int8,
    pack_words,
    write_model,
)
from hypothesis import given
from hypothesis import strategies as st

import quantize
from quantize.foreign.bits import num_words, unpack_bits
from quantize.foreign.recognize import dequantized


def read(path: Path) -> Any:
    return dequantized(quantize.open_checkpoint(path))


def check(path: Path, meant: dict[str, np.ndarray]) -> Any:
    """Every tensor, whole and by uneven rows, in the plain model's names and shapes."""
    checkpoint = read(path)
    assert set(checkpoint.names()) == set(meant)
    for name, expected in meant.items():
        assert checkpoint.info(name).shape == expected.shape
        whole = checkpoint.load_float32(name)
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(checkpoint.load_rows(name, 5, 42), whole[5:42])
    assert "quantization_config" not in checkpoint.config
    return checkpoint


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path: Path, bits: int, version: int, act_order: bool) -> None:
    pack, config = gptq(bits, version=version, symmetric=False, act_order=act_order)
    checkpoint = check(tmp_path, write_model(tmp_path, pack, config))
    assert checkpoint.origin == f"dequantized from GPTQ int{bits} g32 (safetensors)"


def test_gptq_whose_configuration_lies_beside(tmp_path: Path) -> None:
    pack, config = gptq()
    meant = write_model(tmp_path, pack, None)
    del config["quant_method"]
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    checkpoint = check(tmp_path, meant)
    assert tmp_path / "quantize_config.json" in checkpoint.source_files()


def test_empty_biases_of_gptq_writers_are_left_out(tmp_path: Path) -> None:
    pack, config = gptq()
    zeros = {f"model.layers.0.{part}.bias": np.zeros(shape[0], np.float16) for part, shape in LINEARS.items()}
    check(tmp_path, write_model(tmp_path, pack, config, zeros))


def test_awq(tmp_path: Path) -> None:
    pack, config = awq()
    assert check(tmp_path, write_model(tmp_path, pack, config)).origin == "dequantized from AWQ int4 g32 (safetensors)"


def test_fp8_in_blocks_as_deepseek_publishes_it(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    checkpoint = check(tmp_path, write_model(tmp_path, fp8("block", "weight_scale_inv"), config))
    assert checkpoint.origin == "dequantized from FP8 fp8 in blocks (safetensors)"


def test_fp8_with_static_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    scales = {f"{DOWN}.input_scale": np.float32(0.5), "model.layers.0.self_attn.k_scale": np.float32(1)}
    check(tmp_path, write_model(tmp_path, fp8("scalar"), config, scales))
    assert f"scales of inputs and of the KV cache are left out ({DOWN}.input_scale, 2 such)" in caplog.text


@pytest.mark.parametrize(
    ("pack", "algorithm"),
    [
        (fp8("scalar"), "FP8"),
        (fp8("channel"), "FP8_PER_CHANNEL_PER_TOKEN"),
        (fp8("block4"), "fp8_pb_wo"),
        (modelopt_int4(), "W4A16_AWQ"),
        (modelopt_int4(pre_quant_scale=True), "W4A16_AWQ"),
        (modelopt_int8, "W8A8_SQ_PER_CHANNEL"),
        (modelopt_fp4("nvfp4"), "NVFP4"),
        (modelopt_fp4("mxfp4"), "MXFP4"),
        (fp8("scalar"), "MIXED_PRECISION"),
    ],
)
def test_modelopt(tmp_path: Path, pack: Pack, algorithm: str) -> None:
    meant = write_model(tmp_path, pack, None)
    quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    check(tmp_path, meant)
    (tmp_path / "hf_quant_config.json").unlink()
    write_model(tmp_path, pack, {"quant_method": "modelopt", **quantization})  # the copy in config.json is enough
    check(tmp_path, meant)


def test_modelopt_w4a8_does_not_apply_the_second_scale(tmp_path: Path) -> None:
    extra = {f"model.layers.0.{part}.weight_scale_2": np.float32(3) for part in LINEARS}
    check(
        tmp_path,
        write_model(tmp_path, modelopt_int4(), {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, extra),
    )


WEIGHTS = {
    "pack-quantized": [
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    ],
    "int-quantized": [{"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}],
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True},
    ],
    "nvfp4-pack-quantized": [
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    ],
    "mxfp4-pack-quantized": [
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    ],
    "mxfp8-quantized": [{"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}],
}


@pytest.mark.parametrize(
    ("layout", "arguments"), [(layout, arguments) for layout, all_ in WEIGHTS.items() for arguments in all_]
)
def test_compressed_tensors_own_compressors(tmp_path: Path, layout: str, arguments: dict[str, Any]) -> None:
    """Written by the library, and compared with what the library itself makes of it."""
    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(module: str, weight: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        rows, columns = weight.shape
        shape = {
            "tensor": (1,),
            "channel": (rows, 1),
            "block": (-(-rows // 128), -(-columns // 128)),
        }.get(str(arguments["strategy"]), (rows, columns // (weights.group_size or 1)))
        scales = torch.from_numpy(2.0 ** rng.integers(-9, -5, shape)).to(torch.float32)
        state = {"weight": torch.from_numpy(weight), "weight_scale": scales}
        if layout == "nvfp4-pack-quantized":
            state |= {"weight_global_scale": torch.tensor([1024.0]), "weight_scale": scales * 1024}
        if not weights.symmetric:
            zeros = rng.integers(-(2 ** (weights.num_bits - 1)), 2 ** (weights.num_bits - 1), shape)
            state["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        stored = compressor.compress(state, scheme)
        meant = compressor.decompress(stored, scheme)["weight"].to(torch.float32)
        return dict(stored), meant.numpy()

    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    # The library computes in bfloat16 what it does not in the scales' type: with powers of two that is exact.
    check(tmp_path, write_model(tmp_path, pack, config))


@given(st.integers(1, 8), st.data())
def test_bits_unpack_to_what_was_packed(bits: int, data: st.DataObject) -> None:
    count, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    value = st.integers(0, 2**bits - 1)
    values = [data.draw(st.lists(value, min_size=count, max_size=count)) for _ in range(rows)]
    words = pack_words(np.array(values), bits)
    assert words.shape == (rows, num_words(count, bits))
    np.testing.assert_array_equal(unpack_bits(words, bits, count), values)
