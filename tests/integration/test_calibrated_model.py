"""SmolLM2-135M-Instruct in INT4 through a whole build: calibration pays on a real model."""

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

RTN = {"scheme": "int4", "group_size": 64, "symmetric": True}
FIRST_LAYERS = "model.layers.[0-3].*"  # four of thirty: an eighth of the time
TEXT = ROOT / "examples" / "demo" / "shakespeare.txt"


def second_half(path: Path) -> Path:
    """To calibrate on: what is measured is the beginning."""
    text = TEXT.read_text()
    path.write_text(text[len(text) // 2 :])
    return path


def perplexity(source: Path, output: Path, method: str | None) -> float:
    recipe: dict[str, Any] = {"name": str(method), "linears": {"scheme": "none"}}
    if method:
        recipe["overrides"] = [{**RTN, "match": FIRST_LAYERS, "method": method}]
    if method not in (None, "rtn"):
        text = second_half(output.with_suffix(".txt"))
        recipe["calibration"] = {"num_samples": 8, "sequence_length": 256, "text": text}
    tools = quantize.CalibrationTools(builder.calibration_runner)
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(recipe), calibration_tools=tools)
    tokenizer = Tokenizer.from_str(quantize.open_checkpoint(source).side_files()["tokenizer.json"].decode())
    engine = builder.load_reference(output, num_blocks=8)
    ids = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    return builder.perplexity(engine, ids, window=256, max_windows=4).perplexity


def test_awq_and_gptq_recover_much_of_what_rounding_to_nearest_loses(tmp_path: Path) -> None:
    """With few layers and tokens, so that the test is quick: docs/calibration.md has the real figures."""
    source = demo_model()
    exact, rounded, awq, gptq = (
        perplexity(source, tmp_path / str(method), method) for method in (None, "rtn", "awq", "gptq")
    )
    assert exact < rounded
    for found in (awq, gptq):
        assert rounded - found > 0.25 * (rounded - exact)
