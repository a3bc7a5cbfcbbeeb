"""Plans for GPUs from a machine without one: compiled, described, packaged, and refused wherever a GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from demo_model import demo_model
from gpu_engines import machine_with
from served_llama import write_tiny_llama

import builder
from builder.machine import this_machine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(this_machine("tensorrt-rtx").gpus), reason="what a machine without a GPU does"),
]

LIMITS = "max_batch_size: 4, max_num_tokens: 128, max_seq_len: 512"


def plansmith(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plansmith", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == code, done.stderr
    return done


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plansmith(*arguments, "--output", "json", code=code).stdout)
    return data


@pytest.fixture(scope="module")
def build_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "build.yaml"
    (path.parent / "text.txt").write_text("The moon and the lamp. " * 200)
    path.write_text(
        f"model: {demo_model()}\n"
        "quantize: {recipe: int4-rtn}\n"
        f"build: {{target: tensorrt-rtx, sms: [89, 120], {LIMITS}}}\n"
        "verify: {perplexity: {text: text.txt, window: 64, max_increase: 1.5}}\n"
    )
    return path


@pytest.fixture(scope="module")
def first_run(build_file: Path) -> dict[str, Any]:
    return as_json("run", build_file)


@pytest.fixture(scope="module")
def engine(first_run: dict[str, Any]) -> Path:
    return Path(first_run["stages"][1]["path"])


def test_a_real_model_is_compiled_for_two_kinds_of_gpus_and_a_second_run_does_nothing(
    build_file: Path, first_run: dict[str, Any]
) -> None:
    assert [stage["stage"] for stage in first_run["stages"]] == ["quantize", "build", "package"]
    again = plansmith("run", build_file)
    assert "nothing to do: every stage is up to date" in again.stderr
    assert "warning: verify is skipped, so its limits are not held to: the engine needs a GPU" in again.stderr
    assert "verify: skipped" in again.stdout


def test_the_manifest_is_of_the_plans_that_are_there(engine: Path) -> None:
    manifest = builder.read_manifest(engine)
    gpu = manifest.gpu
    assert gpu is not None and gpu.sms == (89, 120) and (gpu.dtype, gpu.weights) == ("float16", "embedded")
    (rank,) = gpu.ranks
    (plan,) = rank.plans
    assert plan.modes == ("mixed", "decode") and set(plan.profiles) == {"mixed", "decode"}
    assert plan.profiles["mixed"]["input_ids"].max == (128,) and plan.profiles["decode"]["input_ids"].max == (4,)
    assert plan.layers["ATTENTION_INPUT"] == rank.num_layers == 30
    size = manifest.files[plan.file].bytes
    assert size == (engine / plan.file).stat().st_size
    # 134.5 million weights in about five bits; code and layouts of two kinds of GPUs come on top in the file
    weights = plan.footprint.weights_bytes
    assert weights is not None and 80e6 < weights < 140e6 and weights < size < 3 * weights
    assert plan.footprint.activation_bytes and rank.peak_rss_bytes and rank.peak_rss_bytes > size
    assert rank.constants["int4"] == sum(_linear_weights()) // 2
    assert (
        manifest.kv_cache.bytes_per_block == 2 * 30 * 3 * 64 * 64 * 2
    )  # keys, values; layers, heads, head size, tokens
    assert manifest.weights == {"int4": "int4", "int8": "int8"}


def _linear_weights() -> list[int]:
    hidden, inner, kv = 576, 1536, 3 * 64
    return [30 * hidden * (2 * hidden + 2 * kv), 30 * hidden * 3 * inner]


def test_inspect_shows_needs_plans_precisions_layers_profiles_and_memory(engine: Path) -> None:
    text = plansmith("inspect", engine).stdout
    version = this_machine("tensorrt-rtx").libraries["tensorrt-rtx"]
    for expected in (f"tensorrt-rtx {version}", "1 of sm89 or sm120", "rank0.plan", "int4", "ATTENTION_INPUT"):
        assert expected in text, expected
    for expected in ("MATRIX_MULTIPLY", "decode: input_ids", "on a GPU, before its KV cache", "peak RSS"):
        assert expected in text, expected


def test_whoever_wants_to_run_it_here_is_told_why_not(
    engine: Path, first_run: dict[str, Any], build_file: Path
) -> None:
    lines = [
        plansmith("serve", first_run["repository"], code=2).stderr,
        plansmith("run", build_file, "--serve", code=2).stderr,
        plansmith(
            "evaluate", engine, "--against", demo_model(), "--text", build_file.with_name("text.txt"), code=2
        ).stderr,
    ]
    for line in lines:
        assert "no NVIDIA GPU" in line and line.count("\n") == 1
    assert "this machine cannot load this engine" in plansmith("doctor", engine, code=2).stdout


@pytest.mark.parametrize(("sm", "code"), [(89, 0), (120, 0), (90, 2)])
def test_a_machine_with_gpus_is_asked_by_its_own_words(engine: Path, tmp_path: Path, sm: int, code: int) -> None:
    version = this_machine("tensorrt-rtx").libraries["tensorrt-rtx"]
    machine = machine_with(sm)
    machine = machine.model_copy(update={"libraries": {**machine.libraries, "tensorrt-rtx": version}})
    (tmp_path / "node.json").write_text(json.dumps({"machine": machine.model_dump(mode="json")}))
    answer = plansmith("doctor", engine, "--machine", tmp_path / "node.json", code=code).stdout
    assert ("--set build.target=tensorrt --set 'build.sms=[90]' on this machine" in answer) == (sm == 90)


def test_a_damaged_plan_and_one_of_another_release_are_refused(engine: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(engine, tmp_path / "damaged")
    with (damaged / "rank0.plan").open("r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)[0]
        file.seek(1 << 20)
        file.write(bytes([byte ^ 1]))
    assert "rank0.plan: content is not what engine.json says" in plansmith("doctor", damaged, code=2).stdout
    older = shutil.copytree(engine, tmp_path / "older")
    manifest = json.loads((older / "engine.json").read_text())
    (older / "engine.json").write_text(json.dumps(manifest | {"library": {"tensorrt-rtx": "1.6.0.3"}}))
    assert "built for tensorrt-rtx 1.6.0.3, found" in plansmith("doctor", older, code=2).stdout


def test_another_fine_tune_takes_the_plans_that_are_there(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"tune{number}").mkdir()
        write_tiny_llama(tmp_path / f"tune{number}", head_dim=32, seed=number)
    build = tmp_path / "build.yaml"
    build.write_text(f"model: tune1\nquantize: {{recipe: none}}\nbuild: {{{_external()}}}\n")
    first, second = (Path(as_json("run", build, "--set", f"model=tune{n}")["stages"][1]["path"]) for n in (1, 2))
    assert (first / "rank0.plan").samefile(second / "rank0.plan")
    assert (first / "rank0.safetensors").read_bytes() != (second / "rank0.safetensors").read_bytes()
    manifest = builder.read_manifest(second)
    assert manifest.gpu is not None and manifest.gpu.ranks[0].weight_files == ("rank0.safetensors",)
    settings = [part for each in _external().split(", ") for part in ("--set", "build." + each.replace(": ", "="))]
    plansmith("build", tmp_path / "tune2", "-o", tmp_path / "engine", "--plans", first, *settings)
    again = builder.read_manifest(tmp_path / "engine")
    assert {name: entry.sha256 for name, entry in again.files.items()} == {
        name: entry.sha256 for name, entry in manifest.files.items()
    }


def _external() -> str:
    return f"target: tensorrt-rtx, sms: [89], weights: external, {LIMITS}"


def test_a_killed_build_goes_on_with_the_ranks_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_llama(tmp_path / "model", head_dim=32)
    settings = ("build.target=tensorrt-rtx", "build.sms=[89]", "build.pp_size=2", "build.max_build_workers=1")
    output = tmp_path / "engine"
    arguments = ["build", str(tmp_path / "model"), "-o", str(output), "-v"]
    arguments += [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen([sys.executable, "-m", "plansmith", *arguments], stderr=subprocess.DEVNULL)
    partial = tmp_path / ".engine.partial"
    deadline = time.monotonic() + 120
    while not list(partial.glob(".built-rank*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(partial.glob("rank0.plan")) and not output.exists()
    done = plansmith(*arguments)
    assert "1 of 2 ranks were built by an earlier run and are kept" in done.stderr
    manifest = builder.read_manifest(output)
    assert set(manifest.files) == {"rank0.plan", "rank1.plan"} == {path.name for path in output.glob("*.plan")}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
