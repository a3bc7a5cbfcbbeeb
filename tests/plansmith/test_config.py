"""A build file says exactly what it means, or is answered with the line that puts it right."""

import json
from pathlib import Path

import pytest

from plansmith.config import apply_setting, json_schema, load_build_file
from plansmith_errors import ConfigError


def load(tmp_path, text, *settings):
    path = tmp_path / "build.yaml"
    path.write_text(text)
    return load_build_file(path, settings)


def test_paths_are_relative_to_the_file_and_settings_win(tmp_path):
    build_file = load(
        tmp_path, "model: m.gguf\nbuild: {max_seq_len: 128}\n", "build.max_seq_len=256", "serve.http_port=0"
    )
    assert build_file.model == tmp_path / "m.gguf"
    assert build_file.store == tmp_path / ".plansmith"
    assert build_file.build.max_seq_len == 256
    assert build_file.serve.http_port == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: a\nquantise: {recipe: fp8}\n", r"unknown key 'quantise'; did you mean 'quantize'\?"),
        ("model: a\nbuild: {max_seqlen: 3}\n", r"unknown key 'build.max_seqlen'; did you mean 'max_seq_len'\?"),
        ("model: a\nverify: {perplexity: {text: t, windw: 3}}\n", r"did you mean 'window'\?"),
        ("model: a\nverify: {top1: {min_agreement: 0.9}}\n", r"the text of verify.perplexity; name it there"),
        ("model: a\nverify: {kl: {max_mean: 0}}\n", r"'verify.kl.max_mean' is 0: input should be greater than 0"),
        ("model: a\nverify: {choices: {questions: q}}\n", r"'verify.choices.labels' is missing"),
        ("model: a\nverify: {choices: {questions: q, labels: l, min_accuracy: 1}}\n", r"did you mean 'min_acc'\?"),
        ("model: a\nmodel: b\n", r"duplicate key 'model' at line 2, column 1"),
        ("build: {}\n", r"'model' is missing"),
        ("model: a\nserve: {http_port: 99999}\n", r"'serve.http_port' is 99999: input should be less than"),
        ("- a\n", r"expected a mapping of keys to values, found a list"),
        ("model: [\n", r"line 2"),
        ("model: a\nbuild: 3\n", r"'build' is 3: expected a section"),
        ("? [a]\n: b\n", r"not a scalar"),
        ("model: 3\n", r"'model' is 3: expected a path"),
        ("model: a\nbuild: {max_batch_size: '8'}\n", r"'build.max_batch_size' is '8': expected a whole number"),
        ("", r"found nothing"),
        ("[" * 1000, r"nested too deeply"),
    ],
)
def test_a_wrong_file_is_answered_with_one_clear_line(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


def test_the_files_of_every_check_are_relative_to_the_file(tmp_path):
    checks = "{perplexity: {text: t.txt}, choices: {questions: q.jsonl, labels: /l.lst}}"
    verify = load(tmp_path, f"model: a\nverify: {checks}\n").verify
    assert verify.perplexity.text == tmp_path / "t.txt"
    assert verify.choices.questions == tmp_path / "q.jsonl"
    assert verify.choices.labels == Path("/l.lst")


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_build_file(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_build_file(tmp_path)


@pytest.mark.parametrize("setting", ["a", "=3", "a..b=3", ".a=3", "model.x=3", "store="])
def test_a_malformed_setting_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        apply_setting({"model": "m"}, setting)


def test_the_committed_schema_is_the_one_the_code_makes():
    committed = Path(__file__).parents[2] / "plansmith" / "build.schema.json"
    assert json.loads(committed.read_text()) == json_schema(), "run: plansmith schema > plansmith/build.schema.json"
