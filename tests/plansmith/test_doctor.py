"""`plansmith doctor`: what this machine can do, and whether one engine or build is for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gpu_engines import machine_with, write_gpu_engine

from builder.targets.facts import SM_NAMES
from plansmith.__main__ import cli
from plansmith.doctor import survey
from plansmith.doctor.abilities import sm_abilities, target_abilities
from plansmith.doctor.survey import Survey
from plansmith.doctor.text import survey_text


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)], standalone_mode=False)


def on(monkeypatch: pytest.MonkeyPatch, *sms: int, **fields: Any) -> Survey:
    monkeypatch.setattr(survey, "this_machine", lambda: machine_with(*sms, **fields))
    return survey.survey()


def test_the_survey_always_succeeds_and_says_the_same_in_both_formats() -> None:
    text, data = doctor(), json.loads(doctor("--output", "json").stdout)
    assert text.return_value in (None, 0)
    for library in data["libraries"]:
        assert library["name"] in text.stdout
    assert {target["target"] for target in data["targets"]} == {"cpu", "tensorrt-rtx", "tensorrt"}
    assert data["targets"][0]["compile"]["can"] and data["python_is_supported"]
    assert [each["sm"] for each in data["sms"]] == sorted(SM_NAMES)


def test_a_laptop_compiles_ahead_of_time_and_is_told_what_it_cannot_do() -> None:
    laptop = machine_with(libraries={"openvino": "2026.4.1", "tensorrt-rtx": "1.7.1.116"})
    cpu, rtx, standard = target_abilities(laptop, None)
    assert cpu.compile.can and cpu.load.can and cpu.serve.can
    assert rtx.compile.can and not rtx.load.can and "no NVIDIA GPU" in rtx.load.why
    assert not standard.compile.can and standard.compile.why.endswith("not installed: pip install 'tensorrt>=11'")
    by_sm = {each.sm: each.compile for each in sm_abilities(laptop)}
    assert by_sm[89]["tensorrt-rtx"].can and not by_sm[90]["tensorrt-rtx"].can


def test_a_hopper_machine_compiles_for_itself() -> None:
    by_sm = {each.sm: each.compile["tensorrt"] for each in sm_abilities(machine_with(90))}
    assert by_sm[90].can and by_sm[90].why == "on this GPU"
    assert not by_sm[100].can and by_sm[100].why == "only on a machine with such a GPU"


def test_without_a_triton_server_nothing_is_served() -> None:
    cpu = target_abilities(machine_with(libraries={"openvino": "1"}), "no Triton server found")[0]
    assert cpu.load.can and not cpu.serve.can and cpu.serve.why == "no Triton server found"


def test_gpus_are_listed_with_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    text = survey_text(on(monkeypatch, 89, 120))
    assert "GPU driver" in text and "580.65.06, CUDA 13.0" in text
    assert "GPU-89, sm89, 25.8 GB" in text and "GPU-120, sm120" in text


def test_an_engine_that_this_machine_cannot_load_ends_with_exit_code_2(gpu_engine: Path) -> None:
    result = doctor(gpu_engine)
    assert result.return_value == 2
    assert result.stdout.startswith(f"this machine cannot load this engine: {gpu_engine}\n- ")
    data = json.loads(doctor(gpu_engine, "--output", "json").stdout)
    assert not data["can"] and len(data["problems"]) == result.stdout.count("\n- ")


def test_another_machines_own_words_decide_for_it(gpu_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = gpu_engine.parent / "node.json"
    for sm, code in ((89, 0), (90, 2)):
        monkeypatch.setattr(survey, "this_machine", lambda sm=sm: machine_with(sm))
        words.write_text(doctor("--output", "json").stdout)
        result = doctor(gpu_engine, "--machine", words)
        assert (result.return_value or 0) == code
    assert "--set build.target=tensorrt --set 'build.sms=[90]' on this machine" in result.stdout


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": {"gpus": 3}}'])
def test_words_of_no_machine_are_refused(gpu_engine: Path, content: str) -> None:
    words = gpu_engine.parent / "node.json"
    words.write_text(content)
    assert "expected what 'plansmith doctor --output json' prints" in str(
        doctor(gpu_engine, "--machine", words).exception
    )


def test_damage_comes_before_what_the_machine_lacks(tmp_path: Path) -> None:
    path = write_gpu_engine(tmp_path / "engine", tp_size=2)
    (path / "rank1.plan").unlink()
    assert "rank1.plan is missing" in doctor(path).stdout


def test_a_path_that_is_neither_is_refused(tmp_path: Path) -> None:
    assert "no engine directory and no .yaml file" in str(doctor(tmp_path).exception)
    assert "--machine needs PATH" in str(doctor("--machine", tmp_path).exception)


def test_a_build_that_cannot_be_made_here_says_why(tmp_path: Path) -> None:
    from test_config import load  # a build file in a folder

    load(tmp_path, "model: absent\n")
    result = doctor(tmp_path / "build.yaml")
    assert result.return_value == 2 and "absent: no such file or directory" in result.stdout
    assert "--machine is for engines" in str(doctor(tmp_path / "build.yaml", "--machine", _words(tmp_path)).exception)


def _words(folder: Path) -> Path:
    path = folder / "node.json"
    path.write_text(json.dumps({"machine": machine_with(89).model_dump(mode="json")}))
    return path
