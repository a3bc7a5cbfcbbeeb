"""Damaged, unknown and unsupported quantized models: one clear line, whatever the header says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_models import DOWN, Pack, awq, fp8, gptq, modelopt_fp4, modelopt_int4, pack_words, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import quantize
from plansmith_errors import CheckpointError, PlansmithError
from quantize.foreign.keeping import keep_stored
from quantize.foreign.recognize import dequantized
from quantize.lint import lint_checkpoint
from quantize.plan import plan_tensors
from quantize.recipe import Recipe

QUERY = "model.layers.0.self_attn.q_proj"


def read(path: Path) -> Any:
    return dequantized(quantize.open_checkpoint(path))


def compressed_int4(module: str, weight: np.ndarray, rng: np.random.Generator) -> Any:
    q = rng.integers(0, 16, weight.shape)
    scales = np.full((len(q), weight.shape[1] // 32), 0.01, np.float32)
    parts = {"weight_packed": pack_words(q, 4), "weight_scale": scales, "weight_shape": np.array(weight.shape)}
    return parts, (q - 8) * np.repeat(scales, 32, axis=1)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt"}
LAYOUTS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": gptq(symmetric=False, act_order=True),
    "awq": awq(),
    "fp8": (fp8("block", "weight_scale_inv"), BLOCKS),
    "compressed-tensors": (compressed_int4, COMPRESSED),
    "int4": (modelopt_int4(pre_quant_scale=True), {**MODELOPT, "quant_algo": "W4A16_AWQ"}),
    "nvfp4": (modelopt_fp4("nvfp4"), {**MODELOPT, "quant_algo": "NVFP4"}),
}
ASKED = {
    name: Recipe.model_validate({"name": name, "linears": linears})
    for name, linears in {
        "gptq": {"scheme": "int4", "group_size": 32, "symmetric": False},
        "awq": {"scheme": "int4", "group_size": 32, "symmetric": False},
        "fp8": {"scheme": "fp8", "granularity": "block"},
        "compressed-tensors": {"scheme": "int4", "group_size": 32},
        "int4": {"scheme": "int4", "group_size": 32},
        "nvfp4": {"scheme": "nvfp4"},
    }.items()
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("damaged") / name for name in LAYOUTS}
    for name, (pack, config) in LAYOUTS.items():
        write_model(paths[name], pack, config)
    return paths


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantized by 'bitsandbytes', which cannot be read; readable are compr"),
        ({"quant_method": ["gptq"]}, r"is quantized by \['gptq'\], which cannot be read"),
        ({}, "is quantized by None, which cannot be read"),
        (3, "quantization_config is 3, expected a mapping"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits is 5, expected 2, 3, 4, 8 in GPTQ files"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, expected a number of columns or -1"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            'checkpoint_format is \'marlin\', expected "gptq", "gptq_v2" in GPTQ files',
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*": {}}},
            "dynamic is .* expected none in GPTQ files",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version is 'gemv', expected 'gemm'"),
        ({**BLOCKS, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], expected \[rows, columns\]"),
        ({**MODELOPT, "quant_algo": "W2A2"}, "quant_algo is 'W2A2', expected one of FP8"),
        ({**COMPRESSED, "format": "marlin-24"}, "format is 'marlin-24', expected"),
        ({**COMPRESSED, "config_groups": []}, r"config_groups is \[\], expected a mapping"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": None}}}, "config_groups.a is .* expected weights with num_"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "weights are sparse"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"v": {}}}}, "has a transform_config"),
    ],
)
def test_what_is_not_supported_is_named(models: dict[str, Path], tmp_path: Path, config: Any, message: str) -> None:
    write_model(tmp_path / "model", compressed_int4, config)
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path / "model")
    assert "\n" not in str(error.value)


Tensors = dict[str, Any]


def without(kind: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{DOWN}.{kind}")


def cut(kind: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{DOWN}.{kind}": tensors[f"{DOWN}.{kind}"][:-1].contiguous()})


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("gptq", without("scales"), f"'{DOWN}' has g_idx, qweight, qzeros but no scales"),
        ("gptq", without("g_idx"), "has no g_idx, though desc_act is true"),
        ("gptq", cut("qzeros"), r"qzeros' is int32 \[8, 20\], expected int32 \[9, 20\]"),
        ("gptq", cut("qweight"), "scales' is float16|g_idx' is int32"),
        ("awq", cut("scales"), r"scales' is float16 \[8, 160\], expected"),
        ("fp8", without("weight_scale_inv"), "has an e4m3 weight but neither"),
        ("fp8", cut("weight_scale_inv"), r"weight_scale_inv' is float32 \[1, 3\], expected"),
        ("compressed-tensors", cut("weight_packed"), "which do not fit 4 bits"),
        ("compressed-tensors", without("weight_shape"), "but no weight_shape"),
        ("int4", cut("weight_scale"), "has weight_scale .* for 160 rows of 288 columns"),
        ("nvfp4", without("weight_scale_2"), "but no weight_scale_2"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    models: dict[str, Path], tmp_path: Path, layout: str, change: Callable[[Tensors], Any], message: str
) -> None:
    path = changed(models[layout], tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=message):
        read(path)


def changed(source: Path, path: Path, change: Callable[[Tensors], Any]) -> Path:
    path.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    return path


def test_groups_that_are_not_there_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.g_idx"][7] = 9

    with pytest.raises(CheckpointError, match=r"has groups 0 .. 9 in g_idx, expected 0 .. 8"):
        read(changed(models["gptq"], tmp_path / "model", change))


def test_a_matrix_of_another_size_than_the_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        wider = {name: value for name, value in tensors.items() if ".q_proj." in name}
        tensors |= {name.replace("q_proj", "k_proj"): value.clone() for name, value in wider.items()}

    with pytest.raises(
        CheckpointError, match=r"k_proj.weight' is packed as \[160, 160\], config.json says \[80, 160\]"
    ):
        read(changed(models["awq"], tmp_path / "model", change))


def test_a_matrix_that_is_there_twice_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"] = tensors["model.embed_tokens.weight"].clone()

    with pytest.raises(CheckpointError, match=r"holds .* both quantized and not"):
        read(changed(models["gptq"], tmp_path / "model", change))


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=5),
    st.lists(st.integers(-1, 300), max_size=5),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_mutated_headers_and_configs_are_errors_or_models(
    models: dict[str, Path], tmp_path: Path, layout: str, data: st.DataObject
) -> None:
    """Any header and configuration either gives a model whose rows can be read, or one clear line."""
    raw = (models[layout] / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    config = json.loads((models[layout] / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, header, config)
    path = tmp_path / "model"
    path.mkdir(exist_ok=True)
    encoded = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + size :])
    (path / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = read(path)
        for name in checkpoint.names():
            rows = checkpoint.load_rows(name, 0, min(3, (*checkpoint.info(name).shape, 1)[0]))
            assert rows.nbytes <= 2**20
        keep_stored(checkpoint, plan_tensors(checkpoint, ASKED[layout]))
    except PlansmithError as error:
        assert "\n" not in str(error)


def mutate(data: st.DataObject, header: dict[str, Any], config: dict[str, Any]) -> None:
    names = sorted(name for name in header if name != "__metadata__")
    name = data.draw(st.sampled_from(names))
    what = data.draw(st.sampled_from(["rename", "drop-name", "dtype", "reshape", "shape", "config"]))
    if what == "rename":
        header[data.draw(st.sampled_from(names)).rpartition(".")[0] + "." + name.rpartition(".")[2]] = header.pop(name)
    elif what == "drop-name":
        header[f"{name}x"] = header.pop(name)
    elif what == "dtype":
        same_size = ["I32", "F32", "U32"], ["F16", "BF16", "I16"], ["U8", "I8", "F8_E4M3", "F8_E5M2"]
        kind = next((tags for tags in same_size if header[name]["dtype"] in tags), ["I64"])
        header[name]["dtype"] = data.draw(st.sampled_from(kind))
    elif what == "reshape" and type(header[name]["shape"]) is list and header[name]["shape"]:
        shape = header[name]["shape"]
        header[name]["shape"] = data.draw(st.sampled_from([shape[::-1], [1, *shape], [*shape, 1]]))
    elif what in ("shape", "reshape"):
        header[name]["shape"] = data.draw(_JUNK)
    else:
        section = config["quantization_config"]
        section[data.draw(st.sampled_from([*sorted(section), "weight_block_size", "checkpoint_format"]))] = data.draw(
            _JUNK
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lint_finds_nothing_in_a_whole_model_and_says_what_is_wrong_with_another(
    models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    assert lint_checkpoint(models[layout], check_values=True) == []

    def change(tensors: Tensors) -> None:
        tensors["model.extra.weight"] = tensors.pop("model.norm.weight")

    kinds = [finding.kind for finding in lint_checkpoint(changed(models[layout], tmp_path / "model", change))]
    assert kinds == ["missing", "extra"]
