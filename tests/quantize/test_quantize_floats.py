"""A model is quantized to blocks of floats: what is written, what is shared, what is refused."""

from __future__ import annotations

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
ATTENTION = "model.layers.0.self_attn."
RECIPES = ("nvfp4", "mxfp4", "mxfp8", "fp8-block", "fp8-tensor")


def run(source: Path, output: Path, chosen: Recipe | str, **options: Any) -> quantize.Checkpoint:
    chosen = quantize.load_recipe(chosen) if isinstance(chosen, str) else chosen
    quantize.quantize_checkpoint(source, output, chosen, **options)
    return quantize.open_checkpoint(output)


def recipe(**linears: Any) -> Recipe:
    return Recipe.model_validate({"name": "test", "linears": linears})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "source", tiny_weights())


@pytest.mark.parametrize(
    ("name", "bound", "bits"),
    [
        ("nvfp4", 0.083, 4.5 + 32 / (64 * 128)),
        ("mxfp4", 0.118, 4.25),
        ("mxfp8", 0.028, 8.25),
        ("fp8-block", 0.028, 8 + 32 / (64 * 128)),
        ("fp8-tensor", 0.028, 8 + 32 / (64 * 128)),
    ],
)
def test_weights_read_back_close_to_the_source(
    source: Path, tmp_path: Path, name: str, bound: float, bits: float
) -> None:
    checkpoint = run(source, tmp_path / "out", name)
    for original, weight in tiny_weights().items():
        tensor = quantize.load_weight(checkpoint, original)
        error = np.linalg.norm(tensor.dequantize() - weight) / np.linalg.norm(weight)
        assert tensor.shape == weight.shape and error <= bound
        if weight.ndim == 2:
            entry = checkpoint.config["quantization_config"]["tensors"][original]
            assert entry["relative_error"] == pytest.approx(error, rel=1e-3, abs=1e-9)
            assert entry["bits_per_weight"] == pytest.approx(tensor.bits_per_weight, abs=1e-3)
    assert quantize.load_weight(checkpoint, DOWN).bits_per_weight == pytest.approx(bits)


def test_other_readers_see_modelopt_names_and_types(source: Path, tmp_path: Path) -> None:
    for name in RECIPES:
        run(source, tmp_path / name, name)
    with safe_open(tmp_path / "nvfp4" / "model.safetensors", framework="np") as file:
        scale = file.get_slice(f"{DOWN}_scale")
        assert (file.get_tensor(DOWN).dtype, file.get_slice(DOWN).get_shape()) == (np.uint8, [64, 64])
        assert (scale.get_dtype(), scale.get_shape()) == ("F8_E4M3", [64, 8])
        assert file.get_tensor(f"{DOWN}_scale_2").shape == ()
    with safe_open(tmp_path / "mxfp8" / "model.safetensors", framework="np") as file:
        assert file.get_slice(DOWN).get_dtype() == "F8_E4M3"
        assert (file.get_tensor(f"{DOWN}_scale").dtype, file.get_slice(f"{DOWN}_scale").get_shape()) == ("u1", [64, 4])
    with safe_open(tmp_path / "fp8-block" / "model.safetensors", framework="np") as file:
        assert file.get_slice(f"{DOWN}_scale").get_shape() == [1, 1]
    with safe_open(tmp_path / "fp8-tensor" / "model.safetensors", framework="np") as file:
        assert file.get_slice(f"{DOWN}_scale").get_shape() == []


def test_tensors_that_run_times_fuse_share_the_scale_of_nvfp4(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights[f"{ATTENTION}k_proj.weight"][3, 5] = 2.688
    checkpoint = run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", "nvfp4")

    def scale(module: str) -> float:
        return float(checkpoint.load(f"model.layers.0.{module}.weight_scale_2"))

    assert scale("self_attn.q_proj") == scale("self_attn.k_proj") == scale("self_attn.v_proj")
    assert scale("self_attn.k_proj") == pytest.approx(2.688 / 2688)
    largest = max(np.abs(weights[f"model.layers.0.mlp.{name}_proj.weight"]).max() for name in ("gate", "up"))
    assert scale("mlp.gate_proj") == scale("mlp.up_proj") == pytest.approx(largest / 2688)
    assert scale("self_attn.o_proj") < scale("self_attn.k_proj")


def test_a_tensor_of_another_scheme_has_no_say_in_a_shared_scale(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights[f"{ATTENTION}v_proj.weight"][0, 0] = 100
    mixed = {"linears": {"scheme": "nvfp4"}, "overrides": [{"match": "*.v_proj.weight", "scheme": "int8"}]}
    chosen = Recipe.model_validate({"name": "mixed", **mixed})
    checkpoint = run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", chosen)
    assert checkpoint.load(f"{ATTENTION}q_proj.weight_scale_2") < 1e-3


def test_fp8_tensors_have_scales_of_their_own(source: Path, tmp_path: Path) -> None:
    checkpoint = run(source, tmp_path / "out", "fp8-tensor")
    for name, weight in tiny_weights().items():
        if "_proj" in name:
            assert checkpoint.load(f"{name}_scale") == pytest.approx(np.abs(weight).max() / 448)
            expected = (weight / checkpoint.load(f"{name}_scale")).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(checkpoint.load(name).view(np.uint8), expected.view(np.uint8))


def test_fp8_blocks_of_a_matrix_that_128_does_not_divide(tmp_path: Path) -> None:
    weights = tiny_weights()
    name = "model.embed_tokens.weight"
    weights[name] = (
        np.random.default_rng(3).normal(size=(300, 64)).astype(np.float32) * np.logspace(-3, 3, 300)[:, None]
    )
    weights[name] = weights[name].astype(np.float32)
    rule = {"scheme": "fp8", "granularity": "block"}
    chosen = Recipe.model_validate({"name": "test", "linears": rule, "embeddings": rule})
    checkpoint = run(write_safetensors(tmp_path / "s", weights, tiny_config(vocab_size=300)), tmp_path / "out", chosen)
    expected = [np.abs(weights[name][begin : begin + 128]).max() / 448 for begin in (0, 128, 256)]
    np.testing.assert_allclose(checkpoint.load(f"{name}_scale"), np.array(expected)[:, None], rtol=1e-6)
    error = np.abs(quantize.load_weight(checkpoint, name).dequantize() - weights[name])
    assert (error <= np.repeat(expected, 128)[:300, None] * 16 + 1e-12).all()


@pytest.mark.parametrize("name", RECIPES)
def test_same_input_same_bytes(source: Path, tmp_path: Path, name: str) -> None:
    ours = run(source, tmp_path / "a", name, max_shard_bytes=20_000)
    again = run(write_gguf(tmp_path / "m.gguf", tiny_weights()), tmp_path / "b", name)
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
    assert sorted(ours.names()) == sorted(again.names())
    assert all(ours.load(tensor).tobytes() == again.load(tensor).tobytes() for tensor in ours.names())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str, bad: float) -> None:
    weights = tiny_weights()
    weights[f"{ATTENTION}v_proj.weight"][17, 3] = bad
    with pytest.raises(QuantizeError, match=r"v_proj.weight': a value in row 17 is not finite"):
        run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", name)
    assert not (tmp_path / "out" / "config.json").exists(), "a half-written directory is no checkpoint"


@pytest.mark.parametrize(
    ("columns", "scheme", "message"),
    [
        (
            48,
            "mxfp4",
            r"48 input columns, which mxfp4's blocks of 32 do not divide; give .* nvfp4 \(blocks of 16\), int8",
        ),
        (48, "mxfp8", r"mxfp8's blocks of 32 do not divide; give this tensor nvfp4 \(blocks of 16\), int8 or fp8"),
        (40, "nvfp4", "40 input columns, which nvfp4's blocks of 16 do not divide; give this tensor int8 or fp8"),
    ],
)
def test_blocks_that_do_not_divide_are_refused_before_any_work(
    tmp_path: Path, columns: int, scheme: str, message: str
) -> None:
    weights = {name: np.ascontiguousarray(weight[..., :columns]) for name, weight in tiny_weights().items()}
    with pytest.raises(QuantizeError, match=message) as caught:
        run(write_safetensors(tmp_path / "s", weights), tmp_path / "out", recipe(scheme=scheme))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_tied_head_of_another_kind_of_fp8_is_refused(source: Path, tmp_path: Path) -> None:
    rules = {"embeddings": {"scheme": "fp8"}, "lm_head": {"scheme": "fp8", "granularity": "tensor"}}
    chosen = Recipe.model_validate({"name": "test", "linears": {"scheme": "int8"}, **rules})
    with pytest.raises(QuantizeError, match="head is its embedding matrix; give both the same rule"):
        run(source, tmp_path / "out", chosen)


@pytest.mark.parametrize("suffix", ["", "_scale", "_scale_2"])
def test_a_tampered_tensor_is_refused(source: Path, tmp_path: Path, suffix: str) -> None:
    checkpoint = run(source, tmp_path / "out", "nvfp4")
    arrays = {name: np.array(checkpoint.load(name)) for name in checkpoint.names()}
    arrays[DOWN + suffix] = np.zeros((3, 5), np.uint8)
    save_file(arrays, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected"):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), DOWN)


def test_a_scale_of_nan_is_refused(source: Path, tmp_path: Path) -> None:
    checkpoint = run(source, tmp_path / "out", "mxfp4")
    arrays = {name: np.array(checkpoint.load(name)) for name in checkpoint.names()}
    arrays[f"{DOWN}_scale"][1, 2] = 255
    save_file(arrays, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.weight_scale' holds NaN \(255\)"):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), DOWN)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nvfp4", {"group_size": 32}),
        ("nvfp4", {"scheme": "mxfp4"}),
        ("mxfp4", {"scheme": "nvfp4"}),
        ("mxfp8", {"group_size": None}),
        ("fp8-block", {"granularity": "channel"}),
        ("fp8-tensor", {"granularity": ["tensor"]}),
        ("fp8-tensor", {"granularity": "row"}),
    ],
)
def test_a_tampered_description_is_refused(source: Path, tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    run(source, tmp_path / "out", name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["tensors"][DOWN] |= change
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlansmithError):
        quantize.load_weight(quantize.open_checkpoint(tmp_path / "out"), DOWN)
