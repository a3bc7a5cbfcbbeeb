"""An automatic choice at the command: what it depends on, what is printed, what inspect says afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import quantize
from plansmith.calibration import calibration_dependencies, calibration_tools
from plansmith.console import Console
from plansmith.options import GlobalOptions
from plansmith.precision_table import choice_table

AUTO = {
    "sensitivity": "kl",
    "budget": {"bits_per_weight": 5.0},
    "bits_per_weight": 4.98,
    "stored_bytes": 123456789,
    "predicted_error": 0.1234,
    "candidates": ["int4 g64", "int8"],
    "sets": {
        f"model.layers.{layer}.{module}": {"chosen": int(layer in (0, 1, 4)), "errors": [0.1, 0.001]}
        for layer in range(5)
        for module in ("self_attn.q_proj", "mlp.down_proj")
    },
}


def test_the_table_names_layers_in_runs() -> None:
    lines = choice_table(quantize.ChoiceRecord.model_validate(AUTO)).split("\n")
    assert lines[0].split() == ["layers", "of", "int4", "g64", "int8"]
    assert lines[1].split() == ["self_attn.q_proj", "2-3", "0-1,", "4"]
    assert lines[3] == (
        "budget bits_per_weight 5: 4.980 bits per weight of the linears, 123.5 MB in all; predicted error 0.1234 "
        "nats per token (sensitivity kl)"
    )


def test_the_text_decides_and_tools_are_there() -> None:
    mixed = quantize.load_recipe("mixed-auto")
    assert calibration_dependencies(mixed, None)["calibration_text"]
    other = quantize.CalibrationSettings(seed=7)
    assert calibration_dependencies(mixed, None) != calibration_dependencies(mixed, other)
    tools = calibration_tools(mixed, None, Console(GlobalOptions()))
    assert tools is not None and tools.on_choice is not None and tools.on_estimate is not None


def plansmith(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plansmith", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def write_model(path: Path, quantization: dict[str, Any] | None = None) -> Path:
    """A llama of one layer."""
    rng = np.random.default_rng(0)
    prefix = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        f"{prefix}input_layernorm.weight": (64,),
        f"{prefix}post_attention_layernorm.weight": (64,),
        **{f"{prefix}self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"},
        **{f"{prefix}mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")},
        f"{prefix}mlp.down_proj.weight": (64, 96),
    }
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 32,
        "tie_word_embeddings": True,
    }
    path.mkdir()
    save_file(
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    return path


def test_quantize_prints_the_choice_and_inspect_repeats_it(tmp_path: Path) -> None:
    model, recipe, output = write_model(tmp_path / "model"), tmp_path / "mine.yaml", tmp_path / "out"
    recipe.write_text(
        "name: mine\nauto:\n  candidates: [{scheme: int4, group_size: 32}, {scheme: int8}]\n"
        "  budget: {bits_per_weight: 6}\n  sensitivity: weights\n"
    )
    done = plansmith("quantize", model, "-o", output, "--recipe", recipe)
    assert done.returncode == 0, done.stderr
    assert "budget bits_per_weight 6: " in done.stderr and "of the values (sensitivity weights)" in done.stderr
    assert "budget bits_per_weight 6: " in plansmith("inspect", output).stdout
    everything = json.loads(plansmith("inspect", output, "--output", "json").stdout)
    assert everything["quantization"]["auto"]["sets"]["model.layers.0.mlp.down_proj"]["chosen"] in (0, 1)


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    auto = {**AUTO, "candidates": "all"}
    quantization = {"quant_method": "plansmith", "format_version": 1, "tensors": {}, "auto": auto}
    shown = plansmith("inspect", write_model(tmp_path / "model", quantization))
    assert shown.returncode == 2 and "quantization_config.auto.candidates" in shown.stderr
    assert len(shown.stderr.strip().split("\n")) == 1
