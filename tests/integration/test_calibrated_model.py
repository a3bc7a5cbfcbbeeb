"""SmolLM2-135M-Instruct in INT4 through a whole build: calibration pays on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_model import ROOT, demo_model
from tokenizers import Tokenizer

import builder
import quantize
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

RTN = {"scheme": "int4", "group_size": 64, "symmetric": True}


def perplexity(source: Path, output: Path, method: str) -> float:
    recipe = {"name": method, "linears": {**RTN, "method": method}}
    if method != "rtn":
        recipe["calibration"] = {"num_samples": 4, "sequence_length": 256}
    tools = quantize.CalibrationTools(builder.calibration_runner)
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(recipe), calibration_tools=tools)
    tokenizer = Tokenizer.from_str(quantize.open_checkpoint(source).side_files()["tokenizer.json"].decode())
    text = (ROOT / "examples" / "demo" / "shakespeare.txt").read_text()
    engine = builder.load_reference(output, num_blocks=8)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return builder.perplexity(engine, ids, window=256, max_windows=4).perplexity


def test_calibrated_int4_is_better_than_rounding_to_nearest(tmp_path: Path) -> None:
    source = demo_model()
    rounded = perplexity(source, tmp_path / "rtn", "rtn")
    assert perplexity(source, tmp_path / "gptq", "gptq") < rounded
