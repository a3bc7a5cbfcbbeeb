"""An engine directory: what its manifest says, and which damaged or foreign ones are refused before they are loaded."""

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import make_step, random_ids, save_model

import builder
from plansmith_errors import BuildError, EngineError, PlansmithError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def built(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine")
    options = builder.BuildOptions(max_batch_size=4, max_num_tokens=64)
    builder.build_engine(checkpoint, path, options, plansmith_version="1.2.3")
    return path


@pytest.fixture
def engine_dir(built, tmp_path):
    return shutil.copytree(built, tmp_path / "engine")


def edit_manifest(path, **changes):
    file = path / "engine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_manifest_says_what_was_built_and_from_what(built, checkpoint):
    manifest = builder.read_manifest(built)
    assert (manifest.plansmith_version, manifest.target, manifest.precision) == ("1.2.3", "cpu", "fast")
    assert manifest.library["openvino"].count(".") == 2
    assert manifest.limits.model_dump() == {
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "vocab_size": 96,
    }
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert manifest.source.files["model.safetensors"] == digest
    assert manifest.model["model_type"] == "llama"
    assert set(manifest.files) == {"model.xml", "model.bin"}


def test_kv_memory_is_predictable(built):
    manifest = builder.read_manifest(built)
    engine = builder.load_engine(built)
    assert engine.limits.tokens_per_block == manifest.kv_cache.tokens_per_block == 32
    assert engine.limits.num_blocks == 4 * 256 // 32  # a full batch of full sequences
    # 8-bit values: two layers, keys and values, 2 heads of 16 in 32 tokens, and the scales of their groups
    assert 4 * 32 * 2 * 16 < manifest.kv_cache.bytes_per_block < 2 * 4 * 32 * 2 * 16
    assert builder.load_engine(built, num_blocks=5).limits.num_blocks == 5


def test_progress_counts_the_weights(checkpoint, tmp_path):
    calls = []
    builder.build_engine(
        checkpoint, tmp_path, builder.BuildOptions(), plansmith_version="1", progress=lambda *call: calls.append(call)
    )
    assert [done for done, _, _ in calls] == list(range(1, 17)) and {total for _, total, _ in calls} == {16}
    assert calls[0][2] == "model.embed_tokens.weight" and calls[-1][2] == "lm_head.weight"


def test_another_library_version_is_refused_with_the_remedy(engine_dir):
    edit_manifest(engine_dir, library={"openvino": "2025.1.0"})
    with pytest.raises(
        EngineError, match=r"built for openvino 2025\.1\.0, found 2026.*pip install openvino==2025\.1\.0"
    ):
        builder.load_engine(engine_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2, expected 1"),
        ({"target": "vulkan"}, "built for target 'vulkan'; this version loads: cpu, tensorrt-rtx, tensorrt"),
        ({"target": "tensorrt"}, "engine.json has no section gpu"),
        ({"limits": {}}, "limits.max_batch_size: field required"),
        (
            {"files": {name: {"bytes": 1, "sha256": ""} for name in ("../x", "model.xml", "model.bin")}},
            r"\.\./x is missing",
        ),
        ({"files": {}}, "does not name model.xml"),
        ({"model": {"model_type": "gpt2"}}, "model_type .gpt2. is not supported"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(engine_dir, changes, message):
    edit_manifest(engine_dir, **changes)
    with pytest.raises(EngineError, match=message) as refused:
        builder.load_engine(engine_dir)
    assert "\n" not in str(refused.value)


@given(st.floats(0, 1, exclude_max=True))
@settings(max_examples=10, deadline=None)
def test_truncated_weights_are_refused(built, tmp_path_factory, fraction):
    path = shutil.copytree(built, tmp_path_factory.mktemp("truncated") / "engine")
    weights = path / "model.bin"
    full = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(int(full * fraction))
    with pytest.raises(EngineError, match=rf"model.bin: \d+ bytes found, {full} expected; build the engine again"):
        builder.load_engine(path)


def test_tampered_and_missing_files_are_refused(engine_dir):
    network = engine_dir / "model.xml"
    network.write_bytes(network.read_bytes().replace(b"model.norm", b"model.morn"))
    with pytest.raises(EngineError, match=r"model\.xml: content is not what engine\.json says"):
        builder.load_engine(engine_dir)
    network.unlink()
    with pytest.raises(EngineError, match=r"model\.xml is missing"):
        builder.load_engine(engine_dir)
    (engine_dir / "engine.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read as JSON"):
        builder.load_engine(engine_dir)
    (engine_dir / "engine.json").unlink()
    with pytest.raises(EngineError, match=r"no engine\.json found"):
        builder.load_engine(engine_dir)


def test_a_step_that_would_leave_the_pool_is_refused(built):
    engine = builder.load_engine(built, num_blocks=4)
    ids = random_ids(num_seqs=1)[0]
    for block in (4, -1):
        with pytest.raises(EngineError, match="this engine has 4"):
            engine.step(make_step([(ids[:8], 0)], [np.array([block])], 32))
    with pytest.raises(EngineError, match="a step has 65 tokens; this engine takes 1 to 64"):
        engine.step(make_step([(ids[:65], 0)], [np.arange(3)], 32))
    assert np.isfinite(engine.step(make_step([(ids[:8], 0)], [np.array([3])], 32))).all()


def test_a_closed_engine_says_so(built):
    engine = builder.load_engine(built, num_blocks=4)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.step(make_step([(random_ids()[0][:8], 0)], [np.arange(1)], 32))


def test_config_and_weights_must_agree(checkpoint, tmp_path):
    for number, (changes, message) in enumerate(
        [
            ({"num_hidden_layers": 3}, r"model\.layers\.2\..* missing"),
            ({"num_hidden_layers": 1}, r"a llama model has no model\.layers\.1"),
            ({"vocab_size": 95}, r"embed_tokens\.weight has shape \(96, 64\); config\.json makes it \(95, 64\)"),
            ({"model_type": "qwen3", "head_dim": 16}, r"q_norm\.weight.* missing"),
        ]
    ):
        source = shutil.copytree(checkpoint, tmp_path / f"source{number}")
        config = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(config))
        output = tmp_path / f"engine{number}"
        output.mkdir()
        with pytest.raises(BuildError, match=message):
            builder.build_engine(source, output, builder.BuildOptions(), plansmith_version="1")
        assert not (output / "engine.json").exists()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_no_numbers_are_refused(checkpoint, tmp_path, name):
    source = shutil.copytree(checkpoint, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[name].reshape(-1)[3] = np.nan
    save_file(tensors, source / "model.safetensors")
    (tmp_path / "engine").mkdir()
    with pytest.raises(BuildError, match=f"{name} holds NaN or infinity"):
        builder.build_engine(source, tmp_path / "engine", builder.BuildOptions(), plansmith_version="1")


def test_a_build_needs_an_empty_directory_and_a_checkpoint(checkpoint, built, tmp_path):
    with pytest.raises(BuildError, match="expected a new, empty directory"):
        builder.build_engine(checkpoint, built, builder.BuildOptions(), plansmith_version="1")
    with pytest.raises(PlansmithError, match="nowhere"):
        builder.build_engine(tmp_path / "nowhere", tmp_path, builder.BuildOptions(), plansmith_version="1")


def test_a_missing_library_is_one_clear_line(built, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError, match=r"torch, which is not installed; run: pip install 'plansmith\[quantize\]'"):
        builder.load_reference(checkpoint)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match=r"OpenVINO, which is not installed; run: pip install 'plansmith\[cpu\]'"):
        builder.load_engine(built)
