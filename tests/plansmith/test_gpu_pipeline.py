"""A build file for GPUs on a machine without one: what is made, what is said to be left out, what is refused.

Plans are files of a few bytes here; tests/integration has real ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gpu_engines import gpu_part, machine_with
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import builder.compatibility
import builder.engine
from builder.build_job import BuildJob
from builder.manifest import KvCache
from builder.network.weights import expected_weights
from builder.targets.built import BuiltModel
from plansmith.__main__ import cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "eos_token_id": 1,
}


def plansmith(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture
def build_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    shapes = expected_weights(builder.ModelSpec.from_hf_config(CONFIG))
    save_file({name: np.ones(shape, np.float16) for name, shape in shapes.items()}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b " * 20)
    path = tmp_path / "build.yaml"
    path.write_text(
        "model: model\nquantize: {recipe: int8}\nbuild: {target: tensorrt-rtx, sms: [89]}\n"
        "verify: {perplexity: {text: text.txt, window: 8, max_increase: 1.01}}\n"
    )
    monkeypatch.setattr(builder.engine, "_target_build", lambda target: fake_build)
    monkeypatch.setattr(builder.compatibility, "this_machine", lambda target: machine_with())
    return path


def fake_build(job: BuildJob) -> BuiltModel:
    kv_cache = KvCache(dtype="float16", tokens_per_block=64, bytes_per_block=1024)
    return BuiltModel(kv_cache, {"int8": "int8"}, gpu=gpu_part(job.output, sms=job.options.sms))


def test_plans_are_built_and_packaged_and_verify_is_said_to_be_skipped(build_file: Path) -> None:
    first = plansmith("run", build_file, "--output", "json")
    assert first.exception is None, first.exception
    data = json.loads(first.stdout)
    assert [stage["stage"] for stage in data["stages"]] == ["quantize", "build", "package"]
    assert data["report"] is None and data["verify_skipped"] and "needs a GPU of sm89" in data["cannot_run"]
    assert "warning: verify is skipped, so its limits are not held to: the engine needs a GPU of sm89" in first.stderr
    second = plansmith("run", build_file)
    assert "nothing to do: every stage is up to date" in second.stderr
    assert "verify: skipped" in second.stdout and "not for this machine to serve: it needs a GPU" in second.stdout
    assert "serve it with" not in second.stdout


def test_how_a_build_is_made_does_not_make_it_again(build_file: Path) -> None:
    plansmith("run", build_file)
    same = plansmith("run", build_file, "--output", "json", "--set", "build.max_build_workers=1")
    assert all(stage["reused"] for stage in json.loads(same.stdout)["stages"])
    other = plansmith("run", build_file, "--output", "json", "--set", "build.sms=[120]")
    assert [stage["reused"] for stage in json.loads(other.stdout)["stages"]] == [True, False, False]


def test_another_release_of_the_library_makes_other_plans(build_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plansmith("run", build_file)
    monkeypatch.setattr("builder.build_check.quick_library_version", lambda target: "1.8.0.1")
    other = plansmith("run", build_file, "--output", "json")
    assert [stage["reused"] for stage in json.loads(other.stdout)["stages"]] == [True, False, False]


def test_serving_is_refused_before_a_server_starts(build_file: Path) -> None:
    refused = plansmith("run", build_file, "--serve")
    assert "engines of target tensorrt-rtx run on a GPU; this machine has no NVIDIA GPU" in str(refused.exception)
    assert not (build_file.parent / ".plansmith").exists()  # nor is anything built
    repository = json.loads(plansmith("run", build_file, "--output", "json").stdout)["repository"]
    line = str(plansmith("serve", repository).exception)
    assert "engine: needs a GPU of sm89; this machine has no NVIDIA GPU" in line and "\n" not in line


def test_the_engine_of_a_repository_is_checked_where_it_is_loaded(build_file: Path) -> None:
    stages = json.loads(plansmith("run", build_file, "--output", "json").stdout)["stages"]
    engine = Path(stages[1]["path"])
    with pytest.raises(builder.engine.EngineError, match="this machine has no NVIDIA GPU"):
        builder.load_engine(engine)
    packaged = Path(stages[2]["path"]) / "llm" / "1" / "engine"
    assert {file.name for file in packaged.iterdir()} == {file.name for file in engine.iterdir()}
    assert "pip install 'plansmith[tensorrt-rtx,gpu,serve]==" in (packaged.parent / "model.py").read_text()


def test_types_that_a_gpu_lacks_are_refused_before_the_model_is_quantized(build_file: Path) -> None:
    refused = plansmith("run", build_file, "--set", "quantize.recipe=fp8", "--set", "build.sms=[80]")
    assert str(refused.exception).startswith("sm80 does not compute fp8; sm75: float16, int8;")
    assert not list((build_file.parent / ".plansmith").glob("quantize-*"))
    said = plansmith("doctor", build_file, "--set", "quantize.recipe=fp8", "--set", "build.sms=[80]")
    assert said.return_value == 2 and "sm80 does not compute fp8" in said.stdout


def test_threads_of_an_engine_on_gpus_are_refused(build_file: Path) -> None:
    refused = plansmith("run", build_file, "--set", "package.num_threads=2")
    assert "num_threads is 2, but" in str(refused.exception) and "runs on GPUs" in str(refused.exception)


def test_what_runs_on_gpus_is_not_compiled_for_a_measurement_here(build_file: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", tmp_path / "model", "--against", tmp_path / "model", "--text", tmp_path / "text.txt")
    refused = plansmith(*arguments, "--window", 8, "--set", "build.target=tensorrt-rtx", "--set", "build.sms=[89]")
    assert "engines of target tensorrt-rtx run on a GPU; this machine has" in str(refused.exception)


def test_inspect_shows_needs_plans_layers_and_memory(build_file: Path) -> None:
    stages = json.loads(plansmith("run", build_file, "--output", "json").stdout)["stages"]
    text = plansmith("inspect", stages[1]["path"]).stdout
    for expected in (
        "1 of sm89",
        "tensorrt-rtx 1.",
        "rank0.plan",
        "mixed+decode",
        "ATTENTION",
        "1.1 GB",
        "1x8",
        "int4",
    ):
        assert expected in text, expected
    data = json.loads(plansmith("inspect", stages[1]["path"], "--output", "json").stdout)
    assert data["gpu"]["ranks"][0]["plans"][0]["profiles"]["decode"]["input_ids"]["max"] == [4]
