"""A model is quantized: what is written, that it reads back, and what is refused before work or half way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_checkpoints import tiny_config, tiny_weights, write_gguf, write_safetensors

import quantize
from plansmith_errors import CheckpointError, PlansmithError, QuantizeError
from quantize.recipe import Recipe

DOWN = "model.layers.1.mlp.down_proj.weight"


def recipe(linears: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return Recipe.model_validate({"name": "test", "linears": linears or {"scheme": "int8"}, **changes})


def run(source: Path, output: Path, chosen: Recipe | str, **options: Any) -> quantize.Checkpoint:
    chosen = quantize.load_recipe(chosen) if isinstance(chosen, str) else chosen
    quantize.quantize_checkpoint(source, output, chosen, **options)
    return quantize.open_checkpoint(output)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "source", tiny_weights(), tokenizer__json='{"a": 1}', LICENSE="MIT")


@pytest.mark.parametrize(("name", "bound"), [("int4-rtn", 0.1), ("int8", 0.01), ("fp8", 0.04), ("none", 0.0)])
def test_weights_read_back_close_to_the_source(source: Path, tmp_path: Path, name: str, bound: float) -> None:
    checkpoint = run(source, tmp_path / "out", name)
    for original, weight in tiny_weights().items():
        tensor = quantize.load_weight(checkpoint, original)
        error = np.linalg.norm(tensor.dequantize() - weight) / np.linalg.norm(weight)
        assert tensor.shape == weight.shape
        if weight.ndim == 1:
            assert error == 0, "norms are kept"
        else:
            entry = checkpoint.config["quantization_config"]["tensors"][original]
            assert error <= bound
            assert entry["relative_error"] == pytest.approx(error, rel=1e-3, abs=1e-9)
            assert entry["bits_per_weight"] == pytest.approx(tensor.bits_per_weight, abs=1e-3)


def test_provenance_and_side_files(source: Path, tmp_path: Path) -> None:
    checkpoint = run(source, tmp_path / "out", "int4-rtn")
    config = checkpoint.config["quantization_config"]
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert config["source"]["sha256"]["model.safetensors"] == digest
    assert set(config["source"]["sha256"]) == {"config.json", "model.safetensors", "tokenizer.json", "LICENSE"}
    assert config["recipe"] == quantize.load_recipe("int4-rtn").model_dump(mode="json", exclude_none=True)
    assert checkpoint.side_files() == {"LICENSE": b"MIT", "tokenizer.json": b'{"a": 1}'}
    assert checkpoint.origin == "quantized safetensors (plansmith)"


def test_other_readers_can_open_it(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "int4-rtn")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.get_slice(DOWN).get_shape() == [64, 64]
        assert file.get_tensor(f"{DOWN}_scale").dtype == np.float16


def test_gguf_and_safetensors_of_one_model_give_one_result(source: Path, tmp_path: Path) -> None:
    ours = run(write_gguf(tmp_path / "m.gguf", tiny_weights()), tmp_path / "a", "int4-rtn")
    theirs = run(source, tmp_path / "b", "int4-rtn")
    assert sorted(ours.names()) == sorted(theirs.names())
    assert all(ours.load(name).tobytes() == theirs.load(name).tobytes() for name in ours.names())
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} == set(ours.side_files())


def test_same_input_same_bytes(source: Path, tmp_path: Path) -> None:
    for output in ("a", "b"):
        run(source, tmp_path / output, "int4-rtn", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_shards(source: Path, tmp_path: Path) -> None:
    whole = run(source, tmp_path / "whole", "int4-rtn")
    sharded = run(source, tmp_path / "sharded", "int4-rtn", max_shard_bytes=20_000)
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 25_000 for shard in shards)
    assert sorted(sharded.names()) == sorted(whole.names())
    for name in whole.names():
        np.testing.assert_array_equal(sharded.load(name), whole.load(name))


def test_progress_and_report(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    report = quantize.quantize_checkpoint(
        source, tmp_path / "out", quantize.load_recipe("int8"), progress=lambda *step: seen.append(step)
    )
    assert [step[0] for step in seen] == list(range(1, len(report.tensors) + 1))
    assert {step[1] for step in seen} == {len(report.tensors)}
    assert report.bytes_out < report.bytes_in / 3
    assert 0 < report.relative_error < 0.01
    data = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < data - report.bytes_out < 10_000, "the rest is the header"


def test_overrides_mix_precisions(source: Path, tmp_path: Path) -> None:
    overrides = [{"match": "*.mlp.*", "scheme": "fp8"}, {"match": "*.down_proj.weight", "scheme": "none"}]
    checkpoint = run(source, tmp_path / "out", recipe({"scheme": "int4", "group_size": 32}, overrides=overrides))
    assert quantize.load_weight(checkpoint, DOWN).scheme == "none"
    assert quantize.load_weight(checkpoint, DOWN.replace("down", "up")).scheme == "fp8"
    q_proj = quantize.load_weight(checkpoint, "model.layers.0.self_attn.q_proj.weight")
    assert q_proj.scheme == "int4" and q_proj.is_symmetric and q_proj.group_size == 32


def test_kept_matrices_change_type_only_when_asked(tmp_path: Path) -> None:
    weights = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in tiny_weights().items()}
    source = write_safetensors(tmp_path / "source", weights)
    assert run(source, tmp_path / "a", "none").load(DOWN).tobytes() == weights[DOWN].tobytes()
    checkpoint = run(source, tmp_path / "b", recipe({"scheme": "none"}, keep_dtype="float16"))
    assert checkpoint.info(DOWN).dtype == "float16" and checkpoint.info("model.norm.weight").dtype == "bfloat16"


def test_an_untied_head_has_its_own_rule(tmp_path: Path) -> None:
    source = write_safetensors(tmp_path / "s", tiny_weights(tied=False), tiny_config(tie_word_embeddings=False))
    checkpoint = run(source, tmp_path / "out", recipe(embeddings={"scheme": "none"}, lm_head={"scheme": "int8"}))
    assert quantize.load_weight(checkpoint, "lm_head.weight").scheme == "int8"
    assert quantize.load_weight(checkpoint, "model.embed_tokens.weight").scheme == "none"


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    source = write_safetensors(tmp_path / "s", tiny_weights(tied=False), tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in run(source, tmp_path / "out", "int8")
    with pytest.raises(QuantizeError, match="head is its embedding matrix; give both the same rule"):
        run(source, tmp_path / "out2", recipe(lm_head={"scheme": "fp8"}))


def test_tiny_scales_are_kept_in_float32(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights[DOWN] *= 1e-7
    checkpoint = run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", "int4-rtn")
    tensor = quantize.load_weight(checkpoint, DOWN)
    assert tensor.scales is not None and tensor.scales.dtype == np.float32
    assert np.linalg.norm(tensor.dequantize() - weights[DOWN]) < 0.1 * np.linalg.norm(weights[DOWN])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int4-rtn", "none"])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, bad: float, name: str) -> None:
    weights = tiny_weights()
    weights[DOWN][17, 3] = bad
    with pytest.raises(QuantizeError, match=r"down_proj.weight': a value in row 17 is not finite"):
        run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", name)
    assert not (tmp_path / "out" / "config.json").exists(), "a half-written directory is no checkpoint"


def test_a_value_too_large_for_the_kept_type_is_refused(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights[DOWN][0, 0] = 1e6
    with pytest.raises(QuantizeError, match="row 0 does not fit float16; change keep_dtype"):
        run(
            write_safetensors(tmp_path / "s", weights),
            tmp_path / "out",
            recipe({"scheme": "none"}, keep_dtype="float16"),
        )


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            recipe({"scheme": "int4", "group_size": 128}),
            "64 input columns, which group_size 128 does not divide; .*: 32, 64",
        ),
        (recipe(overrides=[{"match": "*.donw_proj.*", "scheme": "fp8"}]), "'.*donw_proj.*' matches no matrix"),
    ],
)
def test_recipes_that_do_not_fit_are_refused_before_any_work(
    source: Path, tmp_path: Path, chosen: Recipe, message: str
) -> None:
    with pytest.raises(QuantizeError, match=message):
        run(source, tmp_path / "out", chosen)
    assert not (tmp_path / "out").exists()


def test_no_group_size_fits(tmp_path: Path) -> None:
    weights = {name: np.ascontiguousarray(w[..., :62]) for name, w in tiny_weights().items()}
    source = write_safetensors(tmp_path / "s", weights)
    with pytest.raises(QuantizeError, match="none of 32, 64, 128, 192 does; give this tensor int8 or fp8"):
        run(source, tmp_path / "out", recipe({"scheme": "int4", "group_size": 64}))


def test_quantized_sources_are_refused(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "ours", "int8")
    with pytest.raises(QuantizeError, match="already a quantized checkpoint; quantize the original"):
        run(tmp_path / "ours", tmp_path / "again", "int8")
    theirs = write_safetensors(
        tmp_path / "gptq", tiny_weights(), tiny_config(quantization_config={"quant_method": "gptq"})
    )
    with pytest.raises(CheckpointError, match="bits is None, expected 2, 3, 4, 8 in GPTQ files"):
        run(theirs, tmp_path / "again", "int8")
    with pytest.raises(CheckpointError, match="is quantized by 'gptq'"):
        quantize.load_weight(quantize.open_checkpoint(theirs), DOWN)


def cut(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Without the last column of a tensor."""
    return weights | {name: np.ascontiguousarray(weights[name][..., :-1])}


def test_incomplete_and_unknown_models_are_refused(tmp_path: Path) -> None:
    def refused(message: str, weights: dict[str, np.ndarray], **changes: Any) -> None:
        source = write_safetensors(tmp_path / "s", weights, tiny_config(**changes))
        with pytest.raises(CheckpointError, match=message):
            run(source, tmp_path / "out", "int8")

    weights = tiny_weights()
    refused("model_type 'mamba' is not supported; supported: llama", weights, model_type="mamba")
    refused("'lm_head.weight' is missing", weights, tie_word_embeddings=False)
    refused(r"q_norm.weight' is missing", weights, model_type="qwen3")
    refused("num_hidden_layers is '2'", weights, num_hidden_layers="2")
    refused("tensor 'model.layers.2.input_layernorm.weight' is missing|layers.2", weights, num_hidden_layers=3)
    refused("expected true or false", weights, tie_word_embeddings="false")
    refused("'extra.weight' .* belongs to no llama model", weights | {"extra.weight": np.zeros((2, 2), np.float32)})
    refused(r"down_proj.weight' has the shape \[64, 127\], config.json gives it \[64, 128\]", cut(weights, DOWN))
    refused(r"norm.weight' has the shape \[63\], config.json gives it \[64\]", cut(weights, "model.norm.weight"))


def test_the_output_directory_must_be_new(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="is not empty"):
        run(source, source, "int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantizeError, match="file: "):
        run(source, tmp_path / "file", "int8")


@pytest.mark.parametrize("tensor", [DOWN, f"{DOWN}_scale", f"{DOWN}_zero_point"])
def test_a_tampered_quantized_checkpoint_is_refused(source: Path, tmp_path: Path, tensor: str) -> None:
    checkpoint = run(source, tmp_path / "out", "int4-rtn")
    arrays = {name: np.array(checkpoint.load(name)) for name in checkpoint.names()}
    arrays[tensor] = arrays[tensor][:-1]
    save_file(arrays, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected"):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), DOWN)


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "int2"},
        {"group_size": 48},
        {"group_size": None},
        {"symmetric": "no"},
        {"scheme": "fp8"},
        {"scheme": []},
    ],
)
def test_a_tampered_description_never_escapes_our_errors(source: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    run(source, tmp_path / "out", recipe({"scheme": "int4", "group_size": 32}))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["tensors"][DOWN] |= change
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlansmithError):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), DOWN)
