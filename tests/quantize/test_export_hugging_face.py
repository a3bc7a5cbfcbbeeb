"""A quantized model in the layouts of compressed-tensors and ModelOpt: read by their rules, it is the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationConfig
from export_models import (
    HIDDEN,
    dequantized,
    load,
    rows_from_nibbles,
    scaled,
    weights,
    write_model,
    write_quantized,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from plansmith_errors import CheckpointError, ExportError, PlansmithError
from quantize.export import ExportOptions, export_checkpoint
from quantize.export.compressed_tensors_schemes import _pack_zero_points, _words
from quantize.export.int4_rows import pack_rows

DOWN = "model.layers.2.mlp.down_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"


def export(source: Path, layout: Any, consumer: Any = None, **options: Any) -> Path:
    output = source.parent / f"{source.name}-{layout}"
    chosen = ExportOptions(layout, consumer, dtype=options.pop("dtype", "auto"))
    export_checkpoint(source, output, chosen, **options)
    return output


def words_to_values(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """compressed-tensors' rule: value i of a row is bits i * bits onwards of its words, lowest first, less half."""
    per_word = 32 // bits
    columns = [(words.astype(np.int64) >> (bits * place)) % 2**bits for place in range(per_word)]
    return np.stack(columns, axis=-1).reshape(len(words), -1)[:, :count] - 2 ** (bits - 1)


@pytest.mark.parametrize(("recipe", "bits"), [("int4", 4), ("int4-128", 4), ("int4-asym", 4), ("int8", 8)])
def test_packed_integers_of_compressed_tensors(tmp_path: Path, recipe: str, bits: int) -> None:
    source = write_quantized(tmp_path / "q", recipe)
    tensors = load(export(source, "compressed-tensors") / "model.safetensors")
    for name in (DOWN, KEY):
        rows, columns = tensors[f"{name}_shape"]
        values = words_to_values(tensors[f"{name}_packed"], bits, columns).astype(np.float64)
        scales = tensors[f"{name}_scale"]
        if recipe == "int4-asym":
            zeros = words_to_values(tensors[f"{name}_zero_point"].T, 4, rows).T
            values -= np.repeat(zeros, columns // scales.shape[1], axis=1)
        assert (rows, columns) == dequantized(source, name).shape
        # int8 scales are rounded to the model's float16, as the kernels that read them want
        np.testing.assert_allclose(scaled(values, scales), dequantized(source, name), rtol=1e-3 if bits == 8 else 1e-6)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_fp8_keeps_its_bytes_and_scales(tmp_path: Path, layout: str) -> None:
    source = write_quantized(tmp_path / "q", "fp8")
    tensors = load(export(source, layout) / "model.safetensors")
    assert tensors[f"{DOWN}_scale"].shape == ((HIDDEN, 1) if layout == "compressed-tensors" else (HIDDEN,))
    found = tensors[DOWN] * tensors[f"{DOWN}_scale"].reshape(-1, 1)
    np.testing.assert_array_equal(found, dequantized(source, DOWN))


def test_int4_of_modelopt_is_packed_along_the_outputs(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4")
    output = export(source, "modelopt")
    tensors = load(output / "model.safetensors")
    assert tensors[DOWN].dtype == np.uint8
    found = scaled(rows_from_nibbles(tensors[DOWN]), tensors[f"{DOWN}_scale"])
    np.testing.assert_allclose(found, dequantized(source, DOWN), rtol=1e-6)
    quantization = json.loads((output / "hf_quant_config.json").read_text())["quantization"]
    assert quantization == {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": 64,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": ["lm_head"],
    }
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == ("modelopt", "W4A16_AWQ", ["lm_head"])


@pytest.mark.parametrize("recipe", ["int4", "int4-asym", "int8", "fp8"])
def test_configuration_is_what_the_library_writes(tmp_path: Path, recipe: str) -> None:
    source = write_quantized(tmp_path / "q", recipe)
    ours = json.loads((export(source, "compressed-tensors") / "config.json").read_text())["quantization_config"]
    theirs = json.loads(QuantizationConfig.model_validate(ours).model_dump_json())
    around = {"version": "0.20.1", "sparsity_config": {}, "transform_config": {}}  # ModelCompressor.update_config
    assert ours == {**around, **theirs}


def test_layers_left_alone_are_ignored_and_kept(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4", [{"match": DOWN, "scheme": "none"}])
    output = export(source, "compressed-tensors")
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", DOWN.removesuffix(".weight")]
    np.testing.assert_array_equal(load(output / "model.safetensors")[DOWN], weights()[DOWN])


def test_everything_else_is_carried(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4")
    output = export(source, "compressed-tensors", dtype="bfloat16")
    assert {"LICENSE", "README.md", "tokenizer.json", "generation_config.json"} <= {f.name for f in output.iterdir()}
    config = json.loads((output / "config.json").read_text())
    assert (config["torch_dtype"], config["vocab_size"]) == ("bfloat16", 99)
    tensors = load(output / "model.safetensors")
    assert set(weights()) - set(tensors) == {name for name in weights() if "_proj.weight" in name}
    expected = dequantized(source, "model.embed_tokens.weight")  # int8 there, floats here
    np.testing.assert_allclose(tensors["model.embed_tokens.weight"], expected, rtol=2**-8)


def test_same_bytes_twice_and_in_shards(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4")
    first, second = tmp_path / "a", tmp_path / "b"
    seen: list[tuple[int, int, str]] = []
    for output in (first, second):
        seen.clear()
        report = export_checkpoint(
            source, output, ExportOptions("modelopt"), max_shard_bytes=200_000, progress=lambda *step: seen.append(step)
        )
    assert [step[0] for step in seen] == list(range(1, report.num_tensors + 1))
    names = sorted(path.name for path in first.iterdir())
    assert sum(name.startswith("model-0") for name in names) > 2
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert all(name in load(first / file) for name, file in index["weight_map"].items())
    assert len(index["weight_map"]) == report.num_tensors


@pytest.mark.parametrize(
    ("recipe", "layout", "consumer", "expected"),
    [
        ("int4", "compressed-tensors", "tensorrt-llm", "take the format modelopt"),
        ("int8", "compressed-tensors", "tensorrt-llm", "it takes fp8 by channel or block"),
        ("int4", "modelopt", "vllm", "take the format compressed-tensors"),
        ("int8", "modelopt", None, "take the format compressed-tensors"),
        ("int4-asym", "modelopt", None, "no zero points"),
        ("int4-32", "modelopt", None, "groups of 64 and 128"),
        ("int4-asym", "compressed-tensors", "sglang", "read zero points"),
        ("none", "compressed-tensors", None, "nothing to export"),
        ("fp8", "modelopt", "sglang", "SGLang does not load the format 'modelopt'; formats for it: compressed-tensors"),
        ("fp8", "trtllm", "vllm", "vLLM does not load the format 'trtllm'"),
    ],
)
def test_what_the_consumer_would_not_load_is_refused(
    tmp_path: Path, recipe: str, layout: Any, consumer: Any, expected: str
) -> None:
    source = write_quantized(tmp_path / "q", recipe)
    with pytest.raises(ExportError) as error:
        export(source, layout, consumer)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / f"q-{layout}").exists()


def test_two_schemes_go_where_they_are_read_and_split_fused_sets_nowhere(tmp_path: Path) -> None:
    mixed = write_quantized(tmp_path / "mixed", "int4", [{"match": "*.mlp.*", "scheme": "fp8"}])
    config = json.loads((export(mixed, "compressed-tensors") / "config.json").read_text())["quantization_config"]
    assert QuantizationConfig.model_validate(config).format == "mixed-precision"
    assert [len(group["targets"]) for group in config["config_groups"].values()] == [12, 9]  # of three layers
    with pytest.raises(ExportError, match=r"found .*W4A16_AWQ.*, but .* one scheme for all"):
        export(mixed, "trtllm")
    with pytest.raises(ExportError, match="it takes FP8, W4A16_AWQ, W4A8_AWQ, NVFP4 beside other schemes"):
        export(mixed, "modelopt")
    split = write_quantized(tmp_path / "split", "fp8", [{"match": KEY, "scheme": "none"}])
    with pytest.raises(ExportError, match="multiply them as one matrix"):
        export(split, "compressed-tensors")


def test_damaged_or_foreign_sources_are_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "fp8")
    exported = export(source, "compressed-tensors")
    with pytest.raises(ExportError, match="is quantized by compressed-tensors"):
        export_checkpoint(exported, tmp_path / "again", ExportOptions("modelopt"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(PlansmithError, match=r"missing: model\.layers\.3"):
        export_checkpoint(source, tmp_path / "again", ExportOptions("modelopt"))
    with pytest.raises(CheckpointError, match="no such file"):
        export_checkpoint(tmp_path / "absent", tmp_path / "again", ExportOptions("modelopt"))
    assert not (tmp_path / "again").exists()


def test_values_that_do_not_fit_the_type_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", torch_dtype="bfloat16")
    tensors = weights()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + 1e6
    from safetensors.numpy import save_file

    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ExportError, match=r"model\.norm\.weight.*give --dtype bfloat16"):
        export(source, "trtllm", dtype="float16")
    with pytest.raises(ExportError, match="16-bit kernels"):
        export_checkpoint(source, tmp_path / "x", ExportOptions("trtllm", dtype="float32"))


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 6).map(lambda n: 2 * n), st.integers(1, 9)), elements=st.integers(0, 15))
)
def test_rows_of_nibbles_round_trip(values: np.ndarray) -> None:
    np.testing.assert_array_equal(rows_from_nibbles(pack_rows(values)), values.astype(int) - 8)


@given(arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 4)), elements=st.integers(0, 15)))
def test_zero_points_round_trip_for_any_number_of_outputs(zeros: np.ndarray) -> None:
    words = _pack_zero_points(zeros)
    assert words.shape == (-(-len(zeros) // 8), zeros.shape[1])
    np.testing.assert_array_equal(words_to_values(words.T, 4, len(zeros)).T, zeros.astype(int) - 8)


@given(arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 13))))
def test_words_of_bytes_round_trip_for_any_width(values: np.ndarray) -> None:
    np.testing.assert_array_equal(words_to_values(_words(values), 8, values.shape[1]), values.astype(int) - 128)
