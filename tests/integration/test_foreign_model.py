"""SmolLM2-135M-Instruct as other tools' files hold it: read back, kept where the scheme is the one asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from demo_model import demo_model

import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.export.options import Format
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

INT4 = Recipe.model_validate({"name": "int4-g64", "linears": {"scheme": "int4", "group_size": 64, "symmetric": True}})
INT8 = Recipe.model_validate({"name": "int8", "linears": {"scheme": "int8"}})


@pytest.fixture(scope="module")
def neutral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "int4"
    quantize.quantize_checkpoint(demo_model(), path, INT4)
    return path


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_the_real_model_goes_out_and_comes_back(neutral: Path, tmp_path: Path, layout: Format) -> None:
    dtype = "float32" if layout == "compressed-tensors" else "float16"
    export_checkpoint(neutral, tmp_path / "export", ExportOptions(layout, dtype=dtype))
    report = quantize.quantize_checkpoint(tmp_path / "export", tmp_path / "again", INT4)
    assert report.origin == f"dequantized from {'ModelOpt' if layout == 'modelopt' else layout} int4 g64 (safetensors)"
    assert sum(tensor.is_kept for tensor in report.tensors) == 7 * 30
    ours, again = quantize.open_checkpoint(neutral), quantize.open_checkpoint(tmp_path / "again")
    names = [name for name in ours.names() if "_proj.weight" in name]
    assert len(names) == 2 * 7 * 30
    for name in names:
        np.testing.assert_array_equal(ours.load(name), again.load(name))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (neutral / "tokenizer.json").read_bytes()


def test_another_scheme_starts_from_what_the_file_means(neutral: Path, tmp_path: Path) -> None:
    export_checkpoint(neutral, tmp_path / "export", ExportOptions("compressed-tensors", dtype="float32"))
    quantize.quantize_checkpoint(tmp_path / "export", tmp_path / "floats", quantize.load_recipe("none"))
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    del config["quantization_config"]  # now an original model like any other
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    quantize.quantize_checkpoint(tmp_path / "export", tmp_path / "int8", INT8)
    quantize.quantize_checkpoint(tmp_path / "floats", tmp_path / "expected", INT8)
    found, expected = quantize.open_checkpoint(tmp_path / "int8"), quantize.open_checkpoint(tmp_path / "expected")
    for name in expected.names():
        np.testing.assert_array_equal(found.load(name), expected.load(name))
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert not any("kept" in entry for entry in config["tensors"].values())
