"""``plansmith plan`` as a user meets it: from a file to a table, to JSON, to a plot; wrong input in one line."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from plansmith.__main__ import cli
from plansmith.capacity.text import as_rich
from plansmith_errors import PlansmithError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(*arguments):
    """Stdout of a run that succeeds; a refusal is raised."""
    result = CliRunner().invoke(cli, ["plan", *map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def report(*arguments):
    return json.loads(run(*arguments, "--output", "json"))


def test_a_bare_config_becomes_a_table(config):
    text = run(config, "--gpu", "l40s", "--gpus", "4")
    assert "8.03B parameters, 32 layers" in text and "128 KiB per token" in text
    assert "4 x NVIDIA L40S: 48.3 GB, 864 GB/s, sm89" in text
    rows = [line.split() for line in text.splitlines()]
    assert next(row[:4] for row in rows if row[:1] == ["tp"]) == ["tp", "pp", "GPUs", "fits"]
    assert sum(row[3:4] == ["yes"] for row in rows) == 6  # 1, 2 and 4 GPUs, by tensors and by layers
    assert "smallest: tp_size 1, pp_size 1: 1 GPU; 4 copies on 4 GPUs" in text
    assert "bound by memory" in text and "bound by compute" in text


def test_an_engine_takes_as_many_sequences_as_are_asked_for(config):
    found = report(config, "--gpu", "h100", "--batch", "100")
    assert found["limits"]["max_batch_size"] == 100
    assert found["layouts"][-1]["decode"]["num_tokens"] == 100


def test_json_has_what_the_table_has_and_more(config):
    found = report(config, "--gpu", "h100", "--weights", "fp8", "--kv-cache", "int8", "--context", "8192")
    assert found["weights"]["precision"] == "fp8" and found["kv_cache"] == {"dtype": "int8", "bytes_per_token": 65536}
    assert found["smallest"] == {"tp_size": 1, "pp_size": 1, "ep_size": 1}
    assert found["workload"] == {"context": 8192, "batch_size": 1} and found["num_gpus"] == 8
    first = found["layouts"][0]
    parts = {key: value for key, value in first["memory"].items() if key not in ("memory", "bytes_per_block")}
    assert sum(parts.values()) == first["memory"]["memory"] == found["gpu"]["memory_bytes"]
    assert first["decode_one"]["bound"] == "memory" and first["decode"]["tokens_per_second"] > 0
    assert found["model"]["can_be_built"] is True and found["plot"] is None


def test_a_build_file_says_the_precision_and_the_limits(config, tmp_path):
    (tmp_path / "model").mkdir()
    config.rename(tmp_path / "model" / "config.json")
    build_file = tmp_path / "build.yaml"
    build_file.write_text("model: model\nquantize: {recipe: int4-awq}\nbuild: {max_batch_size: 8, max_seq_len: 2048}\n")
    found = report(build_file, "--gpu", "l4")
    assert found["weights"]["precision"] == "int4-awq" and found["weights"]["nbytes"] < 5.5e9
    assert found["limits"]["max_batch_size"] == 8 and found["workload"]["context"] == 2048
    assert report(build_file, "--gpu", "l4", "--set", "build.max_batch_size=4")["limits"]["max_batch_size"] == 4
    assert report(build_file, "--gpu", "h100", "--weights", "bf16")["weights"]["nbytes"] > 16e9
    assert report(tmp_path / "model", "--gpu", "h100")["weights"]["precision"] == "bf16"  # a checkpoint's directory


def test_a_build_file_for_gpus_says_the_parallelism_and_the_types(config, tmp_path):
    build_file = tmp_path / "build.yaml"
    options = "target: tensorrt-rtx, tp_size: 2, pp_size: 2, dtype: float16, kv_cache_dtype: int8, tokens_per_block: 32"
    build_file.write_text(f"model: .\nquantize: {{recipe: int8-sq}}\nbuild: {{{options}}}\n")
    found = report(build_file, "--gpu", "l4")
    assert found["num_gpus"] == 4 and found["smallest"] == {"tp_size": 2, "pp_size": 2, "ep_size": 1}
    assert len(found["layouts"]) == 1 and found["limits"]["tokens_per_block"] == 32
    assert found["kv_cache"]["dtype"] == "int8"
    assert report(build_file, "--gpu", "l4", "--set", "build.kv_cache_dtype=auto")["kv_cache"]["dtype"] == "fp16"
    assert report(build_file, "--gpu", "l4", "--tp", "4", "--pp", "1")["smallest"]["tp_size"] == 4


def test_a_recipe_with_a_quantized_cache_plans_one(config):
    assert report(config, "--gpu", "h100", "--weights", "int8-kv8")["kv_cache"]["dtype"] == "int8"
    found = report(config, "--gpu", "h100", "--weights", "fp8-kv8")
    assert found["kv_cache"]["dtype"] == "fp8" and any("TensorRT-RTX builds no FP8" in note for note in found["notes"])


def test_what_the_hardware_lacks_and_what_limits_is_noted(config):
    assert any("no bf16: build in float16" in note for note in report(config, "--gpu", "t4")["notes"])
    notes = report(config, "--gpu", "a100", "--weights", "fp8")["notes"]
    assert any("sm80 does not multiply fp8" in note for note in notes)
    assert "TensorRT-RTX does not compile fp8 for sm80" in notes
    assert any("a step takes max_batch_size 32 of" in note for note in notes)
    config.write_text(json.dumps(LLAMA | EXPERTS | {"sliding_window": 1024}))
    notes = report(config, "--gpu", "h100", "--gpus", "16")["notes"]
    assert any("32 layers see 1024 tokens" in note for note in notes)
    assert any("compute all experts" in note for note in notes) and any("NVLink joins 8" in note for note in notes)


def test_experts_have_a_column_of_their_own(config):
    config.write_text(json.dumps(LLAMA | EXPERTS))
    text = run(config, "--gpu", "h100", "--weights", "fp8", "--gpus", "2")
    assert any(line.split()[:4] == ["tp", "pp", "ep", "GPUs"] for line in text.splitlines())


def test_a_terminal_gets_colours_and_whole_cells(config):
    text = as_rich(report(config, "--gpu", "h100", "--gpus", "4"), 120)
    assert "\x1b[1;32m" in text and "…" not in text and "largest batch" in text


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_the_plot_is_a_whole_svg(config, tmp_path, gpus):
    plot = tmp_path / "plan.svg"
    assert report(config, "--gpu", "h100", "--gpus", gpus, "--plot", plot)["plot"] == str(plot)
    root = ElementTree.parse(plot).getroot()
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(shape.attrib["width"]) >= 0
        assert 0 <= float(shape.attrib.get("x", 0)) <= width
        assert float(shape.attrib.get("x", 0)) + float(shape.attrib["width"]) <= width + 0.1
    for curve in root.iter("{http://www.w3.org/2000/svg}polyline"):
        points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert points[0][1] >= points[-1][1]  # more sequences, more tokens a second
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "plan.svg"]


def test_the_page_needs_nothing_else_and_escapes_names(tmp_path):
    folder = tmp_path / "<script>"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    run(folder, "--gpu", "h100", "--plot", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    found = Tags()
    found.feed(page)
    assert not found.links and "script" not in found.tags and found.tags.count("svg") == 1
    assert found.tags.count("table") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json", "--gpu", "h100"], "absent.json: no such file"),
        (["absent", "--gpu", "h100"], "absent: no such file or directory; give a build file"),
        (["config.json", "--gpu", "h101"], "'h101' is unknown; nearest: h100-80g"),
        (["config.json", "--gpu", "h100", "--weights", "fp7"], "--weights 'fp7' is unknown; expected fp16"),
        (["config.json", "--gpu", "h100", "--kv-cache", "fp4"], "'fp16', 'bf16', 'fp8', 'int8'"),
        (["config.json", "--gpu", "h100", "--tp", "3", "--gpus", "3"], "32 attention heads are no multiple"),
        (["config.json", "--gpu", "h100", "--gpus", "37"], "37 GPUs are no product of legal sizes; the nearest"),
        (["config.json", "--gpu", "h100", "--gpus", "0"], "0 is not in the range"),
        (["config.json", "--gpu", "h100", "--context", "200000"], "the model has 131072 positions"),
        (["config.json", "--gpu", "h100", "--context", "4096", "--set", "build.max_seq_len=64"], "max_seq_len is 64"),
        (
            ["config.json", "--gpu", "h100", "--batch", "9", "--set", "build.max_batch_size=8"],
            "max_batch_size is 8; raise",
        ),
        (["config.json", "--gpu", "h100", "--set", "build.max_seq_len=200000"], "the model has 131072 positions"),
        (["config.json", "--gpu", "h100", "--set", "quantize.recipe=fp8"], "only keys of the section 'build'"),
        (["config.json", "--gpu", "h100", "--plot", "plan.png"], "ends in .svg or .html"),
        (["config.json", "--gpu", "h100", "--plot", "config.json"], "ends in .svg or .html"),
        (["config.json", "--gpu", "h100", "--plot", "no/plan.svg"], "no is no directory"),
        (["config.json", "--gpu", "t4", "--gpus", "1"], "do not fit on 1 x t4: tp_size 1 x pp_size 1 needs"),
        (["config.json"], "Missing option '--gpu'"),
        (["broken.json", "--gpu", "h100"], "broken.json: not valid JSON"),
        (["lacks.json", "--gpu", "h100"], "lacks.json: hidden_size is missing"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(config, tmp_path, arguments, message):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "lacks.json").write_text(json.dumps(LLAMA | {"hidden_size": None}))
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "plansmith", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_fits_nowhere_is_told_what_would_fit(config):
    with pytest.raises(PlansmithError, match=r"what would fit: --weights int8 on 1 x t4; --gpus 2 .*; --gpu a10g"):
        run(config, "--gpu", "t4", "--gpus", "1")
