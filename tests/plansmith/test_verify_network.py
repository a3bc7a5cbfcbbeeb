"""``plansmith verify-network``: what a user sees of a right network, a wrong one, and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import builder
from builder.network_gate import gate
from plansmith.__main__ import cli
from plansmith_errors import BuildError, ConfigError, PlansmithError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SMALL = ["--set", "build.tokens_per_block=8", "--set", "build.max_num_tokens=32", "--set", "build.max_batch_size=3"]


def write_llama(path: Path, **changes: Any) -> Path:
    path.mkdir()
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"self_attn.{name}_proj.weight": (32, 32) for name in "qo"}
        shapes |= {prefix + f"self_attn.{name}_proj.weight": (16, 32) for name in "kv"}
        shapes |= {prefix + f"mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj.weight": (32, 48), prefix + "input_layernorm.weight": (32,)}
        shapes |= {prefix + "post_attention_layernorm.weight": (32,)}
    tensors = {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["-q", "verify-network", *map(str, arguments), *SMALL], standalone_mode=False)


def failure(result: Result) -> PlansmithError:
    assert isinstance(result.exception, PlansmithError), result.exception
    return result.exception


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


def test_a_right_network_is_shown_step_by_step(llama: Path) -> None:
    result = run(llama, "--set", "build.tp_size=2")
    assert result.exception is None
    assert "tensorrt-rtx in float16; tp 2, pp 1, ep 1" in result.stdout
    assert "0  prefill of 15" in result.stdout and "3 decoding" in result.stdout and "bounds" in result.stdout


def test_json_has_every_number(llama: Path) -> None:
    data = json.loads(run(llama, "--exact", "--output", "json").stdout)
    assert data["passed"] and data["dtype"] == "float32" and data["parallelism"]["tp_size"] == 1
    assert all(step["max_error"] < 1e-4 and step["same_argmax"] == step["num_tokens"] for step in data["steps"])


def test_a_wrong_network_ends_in_exit_code_3_and_one_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_llama(tmp_path / "other", rms_norm_eps=0.5)
    right = gate.interpreted_engine
    monkeypatch.setattr(gate, "interpreted_engine", lambda path, *given, **named: right(other, *given, **named))
    result = run(llama)
    error = failure(result)
    assert error.exit_code == 3 and "\n" not in str(error)
    assert str(error).startswith("step 0 (prefill of 15): ")
    assert "the first module beyond it is model.layers." in str(error)
    assert "0  prefill of 15" in result.stdout, "the numbers are shown before the verdict"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--set", "build.tp_size=3"], BuildError, "tp_size is 3: .*legal tp_size: 1, 2, 4"),
        (["--set", "build.pp_size=3"], BuildError, "pp_size is 3, but the model has 2 layers"),
        (["--set", "verify.kl.max_mean=1"], ConfigError, "this verb reads only keys of the section 'build'"),
        (["--set", "build.sms=[90]"], ConfigError, "tensorrt-rtx compiles for"),
        (["--target", "tensorrt"], BuildError, "target tensorrt needs the Python module tensorrt"),
    ],
)
def test_wrong_settings_get_one_line(llama: Path, arguments: list[str], kind: type, message: str) -> None:
    error = failure(run(llama, *arguments))
    assert isinstance(error, kind) and error.exit_code == 2 and "\n" not in str(error)
    assert re.search(message, str(error)), str(error)


def test_a_window_that_is_too_long_to_check_is_named(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "mistral", model_type="mistral", sliding_window=64)
    assert "not checked: the sliding window of 64 tokens" in run(path).stdout


def test_the_gate_is_part_of_the_builders_interface(llama: Path) -> None:
    options = builder.BuildOptions(target="tensorrt-rtx", max_num_tokens=32, max_batch_size=2, tokens_per_block=8)
    assert builder.verify_network(llama, options, exact=True).failed is None
    with pytest.raises(BuildError, match="target cpu is no TensorRT network"):
        builder.verify_network(llama, builder.BuildOptions())
