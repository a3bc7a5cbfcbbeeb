"""The command as a user meets it in a terminal and in CI."""

import json
import subprocess
import sys

import pytest

from plansmith.__main__ import VERBS


def plansmith(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "plansmith", *map(str, arguments)], capture_output=True, text=True, timeout=60, **kwargs
    )


def test_help_lists_every_verb_without_importing_one():
    code = "import sys, plansmith.__main__ as m\ntry: m.cli(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in VERBS:
        assert verb in done.stdout
    heavy = {"numpy", "pydantic", "rich", "openvino", "torch", "tokenizers", "builder", "quantize"}
    assert not heavy & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    done = plansmith(verb, "--help")
    assert done.returncode == 0 and "--output" in done.stdout


def test_version():
    done = plansmith("--version")
    assert done.returncode == 0 and done.stdout.startswith("plansmith, version ")


def test_json_goes_to_stdout_and_everything_else_to_stderr():
    done = plansmith("schema", "--output", "json")
    assert json.loads(done.stdout)["title"] == "BuildFile"
    assert plansmith("--output", "json", "schema").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "absent.yaml"], "absent.yaml: no such file"),
        (["quantize", "absent.gguf", "-o", "out"], "absent.gguf"),
        (["build", "absent", "-o", "out"], "absent"),
        (["package", "absent", "--checkpoint", "absent", "-o", "out"], "absent"),
        (["serve", "absent"], "absent"),
        (["inspect", "absent"], "absent"),
        (["evaluate", "absent", "--against", "absent", "--text", "t"], "absent: no such file or directory"),
        (["evaluate", ".", "--text", "t"], "Missing option '--against'"),
        (["evaluate", ".", "--against", "."], "nothing to measure; give --text FILE, or --choices FILE"),
        (["evaluate", ".", "--against", ".", "--windows", "3"], "'verify.perplexity.text' is missing"),
        (["evaluate", ".", "--against", ".", "--choices", "q"], "'verify.choices.labels' is missing"),
        (["evaluate", ".", "--against", ".", "--text", "t", "--window", "1.5"], "expected a whole number"),
        (["evaluate", ".", "--against", ".", "--text", "t", "--set", "serve.http_port=1"], "'verify' and 'build'"),
        (["evaluate", ".", "--against", ".", "--text", "t", "--html", "no/r.html"], "no is no directory that can"),
        (["evaluate", ".", "--against", ".", "--set", "verify.kl.max_mean=1"], "kl and top1 are measured on the text"),
        (["measure"], "did you mean 'evaluate'?"),
        (["lint", "absent"], "absent: no such file or directory"),
        (["export", "absent", "--format", "trtllm", "-o", "out"], "absent: no such file or directory"),
        (["export", "absent", "--format", "gguf", "-o", "out"], "'trtllm', 'compressed-tensors', 'modelopt'"),
        (["export", "absent", "--format", "trtllm", "--consumer", "vllm", "-o", "out"], "vLLM does not load"),
        (["quantize", ".", "-o", "out", "--recipe", "int4-rtm"], "int4-rtn"),
        (["build", ".", "-o", "out", "--set", "quantize.recipe=fp8"], "only keys of the section 'build'"),
        (["build", ".", "-o", "out", "--set", "build.max_seqlen=3"], "did you mean 'max_seq_len'?"),
        (["build", ".", "-o", "out", "--set", "build.sms=[89]"], "target cpu has no such choice"),
        (["build", ".", "-o", "out", "--executor", "ray"], "'build.executor' is 'ray': target cpu has no such choice"),
        (
            ["build", ".", "-o", "out", "--plans", "e"],
            "plans of e take external weights; set build.weights to external",
        ),
        (["build", ".", "-o", "out", "--executor", "slurm"], "'slurm' is not one of 'local', 'ray'"),
        (["doctor", "absent"], "absent: no engine directory and no .yaml file"),
        (["doctor", "absent.yaml"], "absent.yaml: no such file"),
        (["doctor", "--machine", "absent"], "--machine needs PATH"),
        (["doctor", ".", "--machine", "absent"], "absent: cannot be read: No such file or directory"),
        (["frobnicate"], "there is no verb 'frobnicate'; verbs: run, quantize"),
        (["compile"], "did you mean 'build'?"),
        (["run"], "Missing argument 'BUILD_YAML'"),
        (["quantize", ".", "-o", "a" * 300], "File name too long"),
        (["quantize", ".", "-o", "/proc/out"], "/proc/out: cannot be written: "),
        (["schema", "-q", "-v"], "exclude each other"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, expected):
    done = plansmith(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
