"""SmolLM2-135M-Instruct with quantized inputs, keys and values: what each recipe may cost on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_model import ROOT, demo_model
from tokenizers import Tokenizer

import builder
import quantize
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

# Perplexity over that of the unquantized model: what was measured (1.017, 1.029, 1.103) and a margin.
# They guard against changes and say nothing of what is possible.
BOUNDS = {"fp8-static": 1.05, "fp8-kv8": 1.06, "int8-sq": 1.15}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    source = quantize.open_checkpoint(demo_model())
    tokenizer = Tokenizer.from_str(source.side_files()["tokenizer.json"].decode())
    text = (ROOT / "examples" / "demo" / "shakespeare.txt").read_text()
    return tokenizer.encode(text[:20000], add_special_tokens=False).ids


@pytest.fixture(scope="module")
def unquantized(ids: list[int]) -> float:
    return perplexity(demo_model(), ids)


def perplexity(path: Path, ids: list[int]) -> float:
    return builder.perplexity(builder.load_reference(path, num_blocks=8), ids, window=256, max_windows=3).perplexity


@pytest.mark.parametrize("name", BOUNDS)
def test_quantized_activations_cost_what_was_measured(
    tmp_path: Path, ids: list[int], unquantized: float, name: str
) -> None:
    data = quantize.load_recipe(name).model_dump(mode="json", exclude_none=True, exclude={"calibration"})
    recipe = Recipe.model_validate({**data, "calibration": {"num_samples": 2, "sequence_length": 256}})
    tools = quantize.CalibrationTools(builder.calibration_runner)
    quantize.quantize_checkpoint(demo_model(), tmp_path / "out", recipe, calibration_tools=tools)
    found = perplexity(tmp_path / "out", ids)
    assert found < BOUNDS[name] * unquantized, f"{found:.3f}, unquantized {unquantized:.3f}"
