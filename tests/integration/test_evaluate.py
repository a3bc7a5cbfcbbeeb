"""`plansmith evaluate` and the limits of a build: on a tiny model what scripts rely on, on the demo's what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import ROOT, demo_model
from served_llama import write_tiny_llama

pytestmark = pytest.mark.integration

TEXT = "The moon and the lamp. Nobody knew why the baker left in the morning. " * 40
SHAKESPEARE = ROOT / "examples" / "demo" / "shakespeare.txt"

QUESTIONS = (  # goal, the right answer, the wrong one
    ("To boil water for tea,", "put a kettle of water on the stove.", "put a kettle of water in the freezer."),
    ("To keep milk fresh,", "store it in the refrigerator.", "store it in the oven."),
    ("To cut a sheet of paper,", "use a pair of scissors.", "use a bowl of soup."),
    ("To dry wet clothes,", "hang them in the sun.", "hang them under water."),
    ("To write a letter,", "use a pen and paper.", "use a fork and a shoe."),
    ("To sleep well at night,", "lie down in a quiet, dark room.", "stand up in a loud, bright street."),
    ("To open a locked door,", "turn the key in the lock.", "sing a song to the floor."),
    ("To plant a tree,", "dig a hole in the ground.", "dig a hole in the ceiling."),
    ("To make toast,", "put a slice of bread in the toaster.", "put a slice of bread in the washing machine."),
    ("To clean dirty hands,", "wash them with soap and water.", "wash them with mud and oil."),
    ("To cross a river,", "walk over the bridge.", "walk over the cloud."),
    ("To see in the dark,", "turn on a lamp.", "turn on a radio."),
    ("To feed a cat,", "give it a bowl of fish.", "give it a bowl of nails."),
    ("To stay dry in the rain,", "carry an umbrella.", "carry a spoon."),
    ("To learn a language,", "practice speaking every day.", "never speak to anyone."),
    ("To put out a small fire,", "pour water on it.", "pour gasoline on it."),
    ("To ride a bicycle,", "push the pedals with your feet.", "push the pedals with your nose."),
    ("To keep your head warm in winter,", "wear a wool hat.", "wear a block of ice."),
    ("To sweeten coffee,", "add a spoon of sugar.", "add a spoon of sand."),
    ("To tell the time,", "look at a clock.", "look at a potato."),
)


def plansmith(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "plansmith", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done


def as_json(*arguments: object, code: int = 0) -> dict:
    return json.loads(plansmith("--output", "json", *arguments, code=code).stdout)


def write_questions(folder: Path) -> tuple[Path, Path]:
    """Every other one with the right answer second."""
    rows = [
        {"goal": goal, "sol1": (right, wrong)[number % 2], "sol2": (wrong, right)[number % 2]}
        for number, (goal, right, wrong) in enumerate(QUESTIONS)
    ]
    questions, labels = folder / "questions.jsonl", folder / "labels.lst"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels.write_text("".join(f"{number % 2}\n" for number in range(len(rows))))
    return questions, labels


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "model").mkdir()
    write_tiny_llama(path / "model")
    (path / "text.txt").write_text(TEXT)
    plansmith("quantize", path / "model", "-o", path / "int4", "--recipe", "int4-rtn")
    plansmith("build", path / "int4", "-o", path / "engine", "--set", "build.max_seq_len=64")
    return path


def test_an_engine_is_measured_against_its_source(tiny: Path) -> None:
    measured = as_json(
        "evaluate", tiny / "engine", "--against", tiny / "model", "--text", tiny / "text.txt", "--window", 32
    )
    assert measured["divergence"]["num_positions"] == 8 * 31
    assert measured["divergence"]["kl_per_token"] > 0 and 0 < measured["divergence"]["top1_agreement"] <= 1
    assert "compiled for cpu, fast" in measured["against"]
    stored = as_json("inspect", tiny / "int4")
    assert [w["name"] for w in measured["weights"]] == [w["name"] for w in stored["weights"]]
    assert [t["kind"] for t in measured["schemes"]] == [t["kind"] for t in stored["schemes"]]
    header, *rows = plansmith("inspect", tiny / "int4").stdout.splitlines()[-3:]
    assert header.startswith("scheme") and {row.split("  ")[0] for row in rows} == {"int4 g64", "int8"}


def test_checkpoints_run_in_the_reference_and_a_limit_is_exit_code_3(tiny: Path) -> None:
    questions, labels = write_questions(tiny)
    page = tiny / "report.html"
    done = plansmith(
        *("evaluate", tiny / "int4", "--against", tiny / "model", "--reference", "--html", page, "--quiet"),
        *("--text", tiny / "text.txt", "--window", 32, "--windows", 2, "--choices", questions, "--labels", labels),
        *("--set", "verify.kl.max_mean=1e-9", "--set", "verify.choices.min_acc=0"),
        code=3,
    )
    assert "verify.kl.max_mean allows 1e-09; largest weight errors: " in done.stderr
    assert "min_acc" not in done.stderr and done.stderr.count("\n") == 1
    assert "float32 reference" in done.stdout and "acc_norm on questions.jsonl" in done.stdout
    assert page.read_text().count("<rect") == 16
    again = plansmith("evaluate", tiny / "int4", "--against", tiny / "model", "--text", "t", "--html", page, code=2)
    assert "report.html: exists already" in again.stderr


def test_two_engines_need_a_tokenizer_and_agree_with_themselves(tiny: Path) -> None:
    pair = ("evaluate", tiny / "engine", "--against", tiny / "engine", "--text", tiny / "text.txt", "--window", 32)
    refused = plansmith(*pair, code=2)
    assert "--tokenizer CHECKPOINT" in refused.stderr and refused.stderr.count("\n") == 1
    assert "both engines" in plansmith(*pair, "--reference", code=2).stderr
    same = as_json(*pair, "--tokenizer", tiny / "model")
    assert same["divergence"]["kl_per_token"] == 0 and same["divergence"]["top1_agreement"] == 1


def test_the_limits_of_a_build_file_fail_the_run_after_its_artifacts_are_made(tiny: Path) -> None:
    questions, labels = write_questions(tiny)
    build_file = tiny / "build.yaml"
    build_file.write_text(f"""
model: model
build: {{max_seq_len: 64, max_batch_size: 4}}
verify:
  perplexity: {{text: text.txt, window: 32, max_windows: 2}}
  kl: {{max_mean: 1.0e-6}}
  top1: {{min_agreement: 0.0}}
  choices: {{questions: {questions.name}, labels: {labels.name}, min_acc: 0.0}}
""")
    failed = plansmith("run", build_file, code=3)
    assert "verify.kl.max_mean allows 1e-06; largest weight errors: " in failed.stderr
    assert "KL to the unquantized model: 0." in failed.stdout and "choices of questions.jsonl: acc 0." in failed.stdout
    passed = as_json("run", build_file, "--set", "verify.kl.max_mean=10")
    assert all(stage["reused"] for stage in passed["stages"])  # a limit is no part of what is measured
    verify = next(Path(stage["path"]) for stage in passed["stages"] if stage["stage"] == "verify")
    assert sorted(path.name for path in verify.iterdir()) == ["report.html", "report.json"]
    assert passed["report"]["choices"]["num_questions"] == 20
    labels.write_text("0\n" * 19)
    assert "has 19 labels for the 20 questions" in plansmith("run", build_file, code=2).stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The demo's recipe on the demo's model, through the compiled engine."""
    path = tmp_path_factory.mktemp("demo")
    plansmith("quantize", demo_model(), "-o", path / "int4", "--recipe", ROOT / "examples" / "demo" / "recipe.yaml")
    plansmith("build", path / "int4", "-o", path / "engine", "--set", "build.max_seq_len=1024")
    questions, labels = write_questions(path)
    return as_json(
        *("evaluate", path / "engine", "--against", demo_model(), "--text", SHAKESPEARE, "--windows", 2),
        *("--choices", questions, "--labels", labels, "--html", path / "report.html"),
    )


def test_what_int4_costs_the_demos_model(measured: dict) -> None:
    ours, theirs = (measured["perplexity"][side]["perplexity"] for side in ("quantized", "unquantized"))
    assert 1.0 < ours / theirs < 1.3
    assert 0.01 < measured["divergence"]["kl_per_token"] < 0.4
    assert measured["divergence"]["top1_agreement"] > 0.7


def test_the_demos_model_still_knows_what_everybody_knows(measured: dict) -> None:
    quantized, unquantized = (measured["choices"][side]["acc"] for side in ("quantized", "unquantized"))
    assert unquantized >= 0.8 and abs(quantized - unquantized) <= 0.15


def test_the_report_names_every_matrix_of_the_demos_model(measured: dict) -> None:
    assert len(measured["weights"]) == 30 * 7 + 1
    page = Path(measured["html"]).read_text()
    assert all(weight["name"] in page for weight in measured["weights"])
    four_bits, eight_bits = measured["schemes"]
    assert four_bits["kind"] == "int4 g64" and four_bits["bits_per_weight"] == pytest.approx(4.375)
    assert eight_bits["kind"] == "int8" and eight_bits["relative_error"] < 0.02 < four_bits["relative_error"] < 0.11
