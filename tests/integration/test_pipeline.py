"""`plansmith run` on a tiny model: what CI systems of users rely on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served_llama import write_tiny_llama

pytestmark = pytest.mark.integration

SETTINGS = ("build.max_seq_len=64", "build.max_batch_size=2", "package.model_name=tiny")


@pytest.fixture
def build_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write_tiny_llama(tmp_path / "model")
    path = tmp_path / "build.yaml"
    path.write_text("model: model\nquantize: {recipe: int4-rtn}\n")
    return path


def command(build_file: Path, *arguments: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return [sys.executable, "-m", "plansmith", "run", str(build_file), "--output", "json", *settings, *arguments]


def run(build_file: Path, *arguments: str) -> dict:
    done = subprocess.run(command(build_file, *arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_second_run_does_nothing_and_a_change_redoes_only_what_depends_on_it(build_file: Path) -> None:
    first = run(build_file)
    assert [stage["reused"] for stage in first["stages"]] == [False, False, False]
    assert all(stage["reused"] for stage in run(build_file)["stages"])
    changed = run(build_file, "--set", "package.model_name=other")
    assert [stage["reused"] for stage in changed["stages"]] == [True, True, False]
    changed = run(build_file, "--set", "build.max_seq_len=32")
    assert [stage["reused"] for stage in changed["stages"]] == [True, False, False]
    weights = build_file.parent / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert not any(stage["reused"] for stage in run(build_file)["stages"])


def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(build_file: Path) -> None:
    whole = run(build_file, "--set", "store=whole")
    started = time.monotonic()
    run(build_file, "--set", "store=timing")
    duration = time.monotonic() - started
    rng = random.Random(5)
    for _ in range(8):
        process = subprocess.Popen(
            command(build_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(rng.uniform(0.2, 1.0) * duration)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    resumed = run(build_file)
    assert [stage["key"] for stage in resumed["stages"]] == [stage["key"] for stage in whole["stages"]]
    for ours, theirs in zip(resumed["stages"], whole["stages"], strict=True):
        assert content(Path(ours["path"])) == content(Path(theirs["path"]))
    assert not list(Path(resumed["stages"][0]["path"]).parents[1].glob(".*.partial"))


def test_quality_limits_fail_a_run_with_exit_code_3(build_file: Path) -> None:
    text = build_file.parent / "text.txt"
    text.write_text("The moon and the lamp. Nobody knew why the baker left in the morning. " * 40)
    check = ("--set", "verify.perplexity={text: text.txt, window: 32, max_windows: 4, max_increase: 1.0000001}")
    done = subprocess.run(command(build_file, *check), capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)["report"]["perplexity"]
    increase = report["quantized"]["perplexity"] / report["unquantized"]["perplexity"]
    assert report["quantized"]["num_scored"] == 4 * 31
    assert done.returncode == (3 if increase > 1.0000001 else 0)
    assert ("verify.perplexity.max_increase" in done.stderr) == (done.returncode == 3)


def test_the_verbs_do_what_the_pipeline_does(build_file: Path, tmp_path: Path) -> None:
    def plansmith(*arguments: str) -> dict:
        done = subprocess.run(
            [sys.executable, "-m", "plansmith", "--output", "json", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plansmith("quantize", "model", "-o", "quantized", "--recipe", "int4-rtn")
    plansmith("build", "quantized", "-o", "engine", *[p for s in SETTINGS[:2] for p in ("--set", s)])
    plansmith("package", "engine", "--checkpoint", "quantized", "-o", "repository", "--set", SETTINGS[2])
    by_pipeline = {stage["stage"]: Path(stage["path"]) for stage in run(build_file)["stages"]}
    assert content(tmp_path / "quantized") == content(by_pipeline["quantize"])
    assert content(tmp_path / "engine") == content(by_pipeline["build"])
    assert content(tmp_path / "repository") == content(by_pipeline["package"])
    kinds = {name: plansmith("inspect", name)["kind"] for name in ("model", "quantized", "engine", "repository")}
    assert kinds == {
        "model": "checkpoint",
        "quantized": "quantized checkpoint",
        "engine": "engine",
        "repository": "model repository",
    }
    assert plansmith("inspect", "build.yaml")["build"]["precision"] == "fast"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [".plansmith"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["verify.perplexity={text: absent.txt}"], "absent.txt: No such file or directory"),
        (["verify.perplexity={text: build.yaml}"], "one window needs 512"),
        (["build.max_seq_len=9999"], "max_seq_len is 9999"),
        (["quantize.recipe=int4-rtn-sym"], "group"),
        (["model=build.yaml"], "build.yaml"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(build_file: Path, settings: list[str], message: str) -> None:
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command(build_file, *arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    left = {path.name for path in (build_file.parent / ".plansmith").iterdir()}
    assert left <= {"lock", "file-hashes.json"}
