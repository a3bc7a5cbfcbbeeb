"""What a user is told of experts that calibration could not reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from plansmith.__main__ import cli

EXPERTS = [f"model.layers.{layer}.mlp.experts.7" for layer in range(3)]


def inspect(path: Path, *options: str) -> str:
    return CliRunner().invoke(cli, ["inspect", str(path), *options], standalone_mode=False).stdout


def write(path: Path, calibration: Any) -> Path:
    path.mkdir()
    save_file({"model.norm.weight": np.ones(4, np.float32)}, path / "model.safetensors")
    quantization = {"quant_method": "plansmith", "format_version": 1, "tensors": {}, "calibration": calibration}
    config = {"model_type": "qwen3_moe", "tie_word_embeddings": True, "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_inspect_counts_and_names_them(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"uncalibrated_experts": EXPERTS})
    text = inspect(path)
    assert "num_uncalibrated_experts: 3\n" in text and EXPERTS[0] in text
    assert json.loads(inspect(path, "--output", "json"))["uncalibrated_experts"] == EXPERTS


@pytest.mark.parametrize("calibration", [None, {}, {"uncalibrated_experts": []}, {"uncalibrated_experts": 3}, "x"])
def test_where_there_are_none_nothing_is_said(tmp_path: Path, calibration: Any) -> None:
    assert "uncalibrated_experts:" not in inspect(write(tmp_path / "m", calibration))
