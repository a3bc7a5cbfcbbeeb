"""Safetensors directories: what is read, and what is refused before anything is mapped."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_checkpoints import tiny_config, tiny_weights, write_safetensors

import quantize
from plansmith_errors import CheckpointError, PlansmithError


def write_raw(directory: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    return directory


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_lists_and_loads_lazily(tmp_path: Path) -> None:
    weights = tiny_weights()
    checkpoint = quantize.open_checkpoint(write_safetensors(tmp_path, weights, LICENSE="MIT", tokenizer__json="{}"))
    assert {tensor.name: tensor.shape for tensor in checkpoint} == {name: w.shape for name, w in weights.items()}
    view = checkpoint.load("model.norm.weight")
    assert not view.flags.owndata and not view.flags.writeable
    np.testing.assert_array_equal(
        checkpoint.load_rows("model.embed_tokens.weight", 5, 9), weights["model.embed_tokens.weight"][5:9]
    )
    assert checkpoint.side_files() == {"LICENSE": b"MIT", "tokenizer.json": b"{}"}
    assert checkpoint.origin == "float32 safetensors"


def test_bfloat16_is_exact(tmp_path: Path) -> None:
    weights = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in tiny_weights().items()}
    checkpoint = quantize.open_checkpoint(write_safetensors(tmp_path, weights))
    name = "model.norm.weight"
    assert checkpoint.info(name).dtype == "bfloat16"
    np.testing.assert_array_equal(checkpoint.load_float32(name), weights[name].astype(np.float32))


def test_odd_offsets_are_read(tmp_path: Path) -> None:
    """The format does not demand alignment."""
    data = b"\x07" + np.arange(3, dtype=np.float32).tobytes()
    header = {"a": entry(0, 1, [1], "U8"), "b": entry(1, 13, [3])}
    checkpoint = quantize.open_checkpoint(write_raw(tmp_path, header, data))
    np.testing.assert_array_equal(checkpoint.load_float32("b"), [0, 1, 2])


def test_shards_by_index(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"several safetensors files but no model.safetensors.index.json"):
        quantize.open_checkpoint(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert quantize.open_checkpoint(tmp_path).names() == ["a", "b"]
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor 'c' is missing"):
        quantize.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/x.safetensors", "sub\\x.safetensors", "x.bin", 3])
def test_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: object) -> None:
    write_safetensors(tmp_path, tiny_weights())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"expected a .safetensors file beside it"):
        quantize.open_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    pickle_file = tmp_path / "pytorch_model.bin"
    pickle_file.write_bytes(b"\x80\x02")
    for path in (tmp_path, pickle_file):
        with pytest.raises(CheckpointError, match="save the model as safetensors"):
            quantize.open_checkpoint(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        quantize.open_checkpoint(tmp_path / "typo")
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        quantize.open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="give the file itself"):
        quantize.open_checkpoint(tmp_path)
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        quantize.open_checkpoint(tmp_path)


def test_an_unknown_tensor_is_answered_with_the_nearest(tmp_path: Path) -> None:
    checkpoint = quantize.open_checkpoint(write_safetensors(tmp_path, tiny_weights()))
    with pytest.raises(CheckpointError, match=r"nearest name is 'model.norm.weight'"):
        checkpoint.load("model.norm.weights")


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 8, [2])}, 4, "truncated: expected 8 bytes of tensors, found 4"),
        ({"a": entry(0, 8, [2])}, 12, "longer than its header says"),
        ({"a": entry(0, 8, [3])}, 8, "takes 12 bytes, data_offsets .* give it 8"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "overlaps"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "leaves a hole"),
        ({"a": entry(0, 8, [2], "F3")}, 8, "'F3' is not one of F64"),
        ({"a": entry(0, 8, [-2])}, 8, "expected a list of sizes"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "takes"),
        ({"a": entry(8, 0, [2])}, 8, "not a begin and an end"),
        ({"a": [1]}, 8, "expected dtype, shape and data_offsets"),
    ],
)
def test_header_and_file_must_agree(tmp_path: Path, header: dict[str, Any], size: int, message: str) -> None:
    write_raw(tmp_path, header, bytes(size))
    with pytest.raises(CheckpointError, match=message):
        quantize.open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = write_safetensors(tmp_path_factory.mktemp("whole"), tiny_weights())
    return (directory / "model.safetensors").read_bytes()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_at_any_length(file_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(file_bytes[: data.draw(st.integers(0, len(file_bytes) - 1))])
    with pytest.raises(CheckpointError, match="truncated"):
        quantize.open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tampered_header_never_escapes_our_errors(file_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(file_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 2000))] = data.draw(st.sampled_from([0, 0x22, 0x30, 0x39, 0x7D, 0xFF]))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(damaged))
    try:
        for tensor in quantize.open_checkpoint(tmp_path):
            assert tensor.nbytes <= len(file_bytes)
    except PlansmithError as error:
        assert "\n" not in str(error)
