"""An engine of several ranks: every one is in the manifest, one that fails costs no other, plans serve many models.

Worker processes are real; what they build are files of a few bytes.
"""

import json
import shutil
from pathlib import Path

import pytest
from gpu_rank_functions import BUILT_LOG, FAILING_RANKS
from safetensors.numpy import load_file, save_file
from tiny_models import save_model

import builder
from builder.compatibility import check_gpu_files
from builder.network.weights import WeightSource
from builder.targets.tensorrt import engine_build
from plansmith_errors import BuildError

LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, "llama", num_hidden_layers=2)
    return path


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "built.log"
    path.touch()
    monkeypatch.setenv(BUILT_LOG, str(path))
    monkeypatch.setattr(engine_build, "_BUILD", "gpu_rank_functions:build")
    monkeypatch.setattr(engine_build, "_WRITE_WEIGHTS", "gpu_rank_functions:write_weights")
    return path


def build(checkpoint, output, resume_state=None, plans=None, progress=None, **options):
    output.mkdir(exist_ok=True)
    given = builder.BuildOptions(target="tensorrt-rtx", **{"sms": [89], **LIMITS, **options})
    return builder.build_engine(
        checkpoint,
        output,
        given,
        plansmith_version="1.2.3",
        progress=progress,
        plans=plans,
        resume_state=resume_state,
    )


def fine_tuned(checkpoint, path):
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: values + 0.1 for name, values in tensors.items()}, path / "model.safetensors")
    return path


def test_the_manifest_has_every_rank(checkpoint, tmp_path, log):
    calls = []
    manifest = build(checkpoint, tmp_path / "e", progress=lambda *call: calls.append(call), tp_size=2, dtype="bfloat16")
    assert manifest == builder.read_manifest(tmp_path / "e")
    assert set(manifest.files) == {"rank0.plan", "rank1.plan"} == {p.name for p in tmp_path.glob("e/*.plan")}
    gpu = check_gpu_files(tmp_path / "e", manifest)
    assert [(record.rank, record.file_names) for record in gpu.ranks] == [(0, ["rank0.plan"]), (1, ["rank1.plan"])]
    assert all(record.peak_rss_bytes > 10 << 20 for record in gpu.ranks)
    assert (gpu.tp_size, gpu.sms, gpu.dtype, manifest.kv_cache.dtype) == (2, (89,), "bfloat16", "bfloat16")
    assert manifest.precision is None and manifest.weights == {"none": "bfloat16"}
    assert manifest.library["tensorrt-rtx"].count(".") == 3
    assert calls[-1][:2] == (2, 4) and calls[-1][2].startswith("rank ")  # of both ranks, two weights each


def test_a_rank_that_fails_costs_no_other(checkpoint, tmp_path, log, monkeypatch):
    output, state = tmp_path / "e", tmp_path / "state"
    monkeypatch.setenv(FAILING_RANKS, "1")
    with pytest.raises(BuildError, match=r"rank 1 of 2 was not built.*TensorRT has no kernel for it.*kept"):
        build(checkpoint, output, state, tp_size=2)
    assert state.is_dir() and not (output / "engine.json").exists()
    monkeypatch.delenv(FAILING_RANKS)
    build(checkpoint, output, state, tp_size=2)
    assert log.read_text().split("\n") == ["plan 0", "plan 1", ""]
    assert {path.name for path in output.iterdir()} == {"rank0.plan", "rank1.plan", "engine.json"}


def test_where_nothing_was_finished_nothing_is_kept(checkpoint, tmp_path, log, monkeypatch):
    monkeypatch.setenv(FAILING_RANKS, "0")
    with pytest.raises(BuildError, match="TensorRT has no kernel for it"):
        build(checkpoint, tmp_path / "e", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_what_other_settings_left_is_neither_used_nor_kept(checkpoint, tmp_path, log, monkeypatch):
    output, state = tmp_path / "e", tmp_path / "state"
    monkeypatch.setenv(FAILING_RANKS, "0")
    with pytest.raises(BuildError):
        build(checkpoint, output, state, tp_size=2)
    monkeypatch.delenv(FAILING_RANKS)
    manifest = build(checkpoint, output, state, max_batch_size=8)
    assert set(manifest.files) == {"rank0.plan"}
    assert {path.name for path in output.iterdir()} == {"rank0.plan", "engine.json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sms": [75], "dtype": "bfloat16"}, "sm75 does not compute bfloat16; sm75: float16, int8; sm80"),
        ({"tp_size": 3}, "tp_size is 3: num_attention_heads 4 is no multiple of it; legal tp_size: 1, 2"),
        ({"pp_size": 3}, "pp_size is 3, but the model has 2 layers"),
        ({"max_seq_len": 100_000}, "max_seq_len is 100000, but the model has"),
    ],
)
def test_what_is_not_legal_is_refused_before_any_work(checkpoint, tmp_path, log, options, message):
    with pytest.raises(BuildError, match=message) as refused:
        build(checkpoint, tmp_path / "e", tmp_path / "state", **options)
    assert "\n" not in str(refused.value)
    assert log.read_text() == "" and not list((tmp_path / "e").iterdir()) and not (tmp_path / "state").exists()


def test_kv_scales_that_these_plans_do_not_use_are_spoken_of(checkpoint, tmp_path, log, caplog, monkeypatch):
    monkeypatch.setattr(WeightSource, "kv_scales", lambda self, layer: ("fp8", None, None))
    build(checkpoint, tmp_path / "e")
    assert "the KV cache is float16; the checkpoint's fp8 scales are not used" in caplog.text


def test_plans_serve_every_model_of_their_shape(checkpoint, tmp_path, log):
    first = build(checkpoint, tmp_path / "first", weights="external", tp_size=2)
    tuned = fine_tuned(checkpoint, tmp_path / "tuned")
    log.write_text("")
    second = build(tuned, tmp_path / "second", plans=tmp_path / "first", weights="external", tp_size=2)
    assert sorted(log.read_text().split()) == ["0", "1", "weights", "weights"]
    assert second.source.files != first.source.files
    assert [record.plans for record in second.gpu.ranks] == [record.plans for record in first.gpu.ranks]
    assert (tmp_path / "second" / "rank1.plan").samefile(tmp_path / "first" / "rank1.plan")
    check_gpu_files(tmp_path / "second", second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sms": [120]}, r"its plans have sms \[89\], this build asks for \[120\]; build without them"),
        ({"dtype": "bfloat16"}, "its plans have dtype float16, this build asks for bfloat16"),
        ({"max_batch_size": 5}, "its plans have max_batch_size 4, this build asks for 5"),
        ({"tokens_per_block": 32}, "its plans have tokens_per_block 64"),
        ({"weights": None}, "take external weights; set build.weights to external, on a GPU target"),
    ],
)
def test_plans_of_another_kind_are_refused(checkpoint, tmp_path, log, options, message):
    build(checkpoint, tmp_path / "first", weights="external")
    with pytest.raises(BuildError, match=message):
        build(checkpoint, tmp_path / "second", plans=tmp_path / "first", **{"weights": "external", **options})


def test_plans_of_another_architecture_and_damaged_ones_are_refused(checkpoint, tmp_path, log):
    build(checkpoint, tmp_path / "first", weights="external")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(BuildError, match="its plans are of another architecture than"):
        build(other, tmp_path / "second", plans=tmp_path / "first", weights="external")
    Path(tmp_path / "first" / "rank0.plan").unlink()
    with pytest.raises(BuildError, match=r"rank0\.plan is missing"):
        build(checkpoint, tmp_path / "third", plans=tmp_path / "first", weights="external")


def test_the_layout_of_a_model_is_everything_but_its_values(checkpoint, tmp_path):
    from quantize import open_checkpoint

    tuned = fine_tuned(checkpoint, tmp_path / "tuned")
    assert builder.plan_layout(open_checkpoint(tuned)) == builder.plan_layout(open_checkpoint(checkpoint))
    save_model(tmp_path, "llama", num_hidden_layers=3)
    assert builder.plan_layout(open_checkpoint(tmp_path)) != builder.plan_layout(open_checkpoint(checkpoint))
