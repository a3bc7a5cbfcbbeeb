"""SmolLM2-135M-Instruct with the precision of each set chosen by measurement: better than a choice without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo_model import ROOT, demo_model
from tokenizers import Tokenizer

import builder
import quantize
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

INT4, INT8 = {"scheme": "int4", "group_size": 64, "symmetric": True}, {"scheme": "int8"}


def divergence(source: Path, output: Path, **recipe: Any) -> tuple[float, int]:
    """KL divergence to the unquantized model, and stored bytes."""
    tools = quantize.CalibrationTools(builder.calibration_runner)
    model = Recipe.model_validate({"name": "mixed", **recipe})
    report = quantize.quantize_checkpoint(source, output, model, calibration_tools=tools)
    tokenizer = Tokenizer.from_str(quantize.open_checkpoint(source).side_files()["tokenizer.json"].decode())
    text = (ROOT / "examples" / "demo" / "shakespeare.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids[-300:]
    engine, baseline = (builder.load_reference(path, num_blocks=8) for path in (output, source))
    return builder.compare_engines(engine, baseline, ids, window=256, max_windows=1).kl_per_token, report.bytes_out


def test_a_measured_choice_beats_the_outer_layers_at_the_same_size(tmp_path: Path) -> None:
    source = demo_model()
    outer = [{"match": f"model.layers.{layer}.*", **INT8} for layer in (0, 1, 2, 27, 28, 29)]
    theirs, size = divergence(source, tmp_path / "outer", linears=INT4, overrides=outer)
    auto = {
        "candidates": [INT4, INT8],
        "budget": {"size_gb": size / 1e9},
        "sensitivity": "output",
        "num_samples": 1,
        "sequence_length": 128,
    }
    ours, our_size = divergence(source, tmp_path / "auto", auto=auto)
    assert our_size <= size and ours < theirs
