"""``plansmith export`` and ``plansmith lint`` as a script in CI meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from plansmith.__main__ import cli

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def plansmith(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    linears = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    linears += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    rng = np.random.default_rng(0)
    weights = {f"model.layers.0.{name}.weight": rng.normal(0, 0.1, (128, 128)).astype(np.float32) for name in linears}
    norms = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
    weights |= {f"{norm}.weight": np.ones(128, np.float32) for norm in norms}
    weights["model.embed_tokens.weight"] = rng.normal(0, 1, (32, 128)).astype(np.float32)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_from_a_model_to_ranks_that_lint_clean(model: Path, tmp_path: Path) -> None:
    quantized, output = tmp_path / "quantized", tmp_path / "ranks"
    assert plansmith("quantize", model, "-o", quantized, "--recipe", "int4-rtn-sym").exit_code == 0
    done = plansmith("export", quantized, "--format", "trtllm", "-o", output, "--output", "json")
    report = json.loads(done.stdout)
    assert (report["scheme"], report["dtype"]) == ("int4 symmetric in groups of 128", "bfloat16")
    assert report["consumer"] == "tensorrt-llm-1.2" and report["bytes_out"] > 0
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "config.json", "rank0.safetensors"]
    done = plansmith("lint", output, "--values")
    assert done.stdout == f"{output}: no findings\n" and done.return_value == 0


def test_findings_go_to_stdout_and_the_exit_code_is_2(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    weights["extra"] = np.ones(1, np.float32)
    save_file(weights, model / "model.safetensors")
    done = plansmith("lint", model)
    assert done.return_value == 2, "which the command exits with"
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["missing", "extra"]
    findings = json.loads(plansmith("lint", model, "--output", "json").stdout)["findings"]
    assert findings[0]["kind"] == "missing" and findings[0]["where"] == "model.norm.weight"


def test_a_refused_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    done = plansmith("export", model, "--format", "trtllm", "--tp", 3, "-o", tmp_path / "out")
    assert "legal tp: 1, 2" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
