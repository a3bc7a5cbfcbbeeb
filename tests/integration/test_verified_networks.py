"""SmolLM2-135M-Instruct in int4 on real text: the networks that are compiled, interpreted, against the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from demo_model import ROOT, demo_model

import quantize
from plansmith.__main__ import cli

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "int4"
    recipe = quantize.Recipe(name="int4", linears={"scheme": "int4", "group_size": 64}, embeddings={"scheme": "int8"})
    quantize.quantize_checkpoint(demo_model(), path, recipe)
    return path


@pytest.mark.parametrize("ranks", [{}, {"tp_size": 3}, {"pp_size": 2}])
def test_a_real_model_passes_on_real_text(int4: Path, ranks: dict[str, int]) -> None:
    settings = [part for key, value in ranks.items() for part in ("--set", f"build.{key}={value}")]
    text = ["--text", str(ROOT / "README.md"), "--set", "build.max_seq_len=1024"]
    arguments = ["-q", "verify-network", str(int4), *text, *settings, "--output", "json"]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.exception is None
    report = json.loads(result.stdout)
    tokens, same = (sum(step[key] for step in report["steps"]) for key in ("num_tokens", "same_argmax"))
    assert report["passed"] and tokens > 250 and same > 0.98 * tokens
    # What was measured, 0.021 and 9e-5, and a margin; the bounds are four times as wide.
    assert max(step["rms_error"] for step in report["steps"]) < 0.05
    assert max(step["kl"] for step in report["steps"]) < 5e-4
