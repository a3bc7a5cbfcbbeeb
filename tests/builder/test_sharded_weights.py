"""What each rank is given of a checkpoint: all the ranks' parts together are the checkpoint, whatever its scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from safetensors.numpy import load_file, save_file
from tiny_models import MIXTURES, save_model

import quantize
from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource, expected_weights
from builder.parallel import Parallelism, Rank
from builder.sharding.memory import build_memory, rank_bytes
from builder.sharding.weights import ShardedWeights, spec_of_rank
from plansmith_errors import BuildError
from quantize.recipe import Recipe

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {"scheme": "none"},
    "int4, groups of 32": {"scheme": "int4", "group_size": 32, "symmetric": False},
    "int4, groups of 128": {"scheme": "int4", "group_size": 128},
    "int4, input scales": {"scheme": "int4", "group_size": 64, "method": "awq", "activations": "fp8"},
    "int8": {"scheme": "int8"},
    "int8, smoothed": {"scheme": "int8", "activations": "int8", "smoothing": 0.5},
    "fp8": {"scheme": "fp8"},
    "fp8 of the tensor": {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"},
    "fp8 blocks": {"scheme": "fp8", "granularity": "block"},
    "nvfp4": {"scheme": "nvfp4", "activations": "nvfp4"},
    "mxfp4": {"scheme": "mxfp4"},
    "mxfp8": {"scheme": "mxfp8"},
}
ATTENTION = "model.layers.1.self_attn."
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    save_with_tokenizer(path, **SIZES)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def open_source(path: Path) -> tuple[WeightSource, ModelSpec]:
    checkpoint = quantize.open_checkpoint(path)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    return WeightSource(checkpoint, spec), spec


def quantized(source: Path, output: Path, text: Path, linears: dict[str, Any]) -> tuple[WeightSource, ModelSpec]:
    data: dict[str, Any] = {"name": "test", "linears": linears}
    if Recipe.model_validate(data).is_calibrated:
        data["calibration"] = {"text": text, "num_samples": 2, "sequence_length": 32}
    quantize.quantize_checkpoint(source, output, Recipe.model_validate(data), calibration_tools=TOOLS)
    return open_source(output)


def save_family(path: Path, family: str) -> None:
    """Those with experts have four."""
    model_type, settings = MIXTURES.get(family, (family, {}))
    if model_type != family or settings:
        settings = settings | {"num_local_experts" if model_type == "mixtral" else "num_experts": 4}
    save_model(path, model_type, **settings)


def all_parts(weights: WeightSource, spec: ModelSpec, tp_size: int) -> list[ShardedWeights]:
    return [ShardedWeights(weights, spec, rank) for rank in Parallelism(tp_size).ranks()]


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("linears", SCHEMES.values(), ids=SCHEMES)
def test_the_parts_of_all_ranks_are_the_whole_matrix(source, tmp_path, text, linears, tp_size):
    weights, spec = quantized(source, tmp_path / "out", text, linears)
    parts = all_parts(weights, spec, tp_size)
    for name, shape in expected_weights(spec).items():
        if len(shape) == 1 or (tp_size == 4 and name.endswith(("k_proj.weight", "v_proj.weight"))):
            continue  # four ranks share two heads: the next test but one
        whole, held = weights.matrix(name).dequantize(), [part.matrix(name).dequantize() for part in parts]
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert [one.shape for one in held] == [part.shapes[name] for part in parts]
        np.testing.assert_array_equal(np.concatenate(held, axis), whole, err_msg=name)


@pytest.mark.parametrize("linears", SCHEMES.values(), ids=SCHEMES)
def test_a_rank_multiplies_its_inputs_by_its_own_part_of_what_calibration_found(source, tmp_path, text, linears):
    weights, spec = quantized(source, tmp_path / "out", text, linears)
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    whole = weights.matrix(ATTENTION + "o_proj.weight")
    parts = [part.matrix(ATTENTION + "o_proj.weight") for part in all_parts(weights, spec, 4)]
    partial = [x[:, 64 * rank : 64 * rank + 64] @ part.effective().T for rank, part in enumerate(parts)]
    np.testing.assert_allclose(sum(partial), x @ whole.effective().T, rtol=1e-4, atol=1e-4)
    assert all(part.activations == whole.activations for part in parts)
    assert all(part.input_scale is whole.input_scale or part.input_scale == whole.input_scale for part in parts)


@pytest.mark.parametrize(("tp_size", "heads"), [(2, [0, 1]), (4, [0, 0, 1, 1])])
def test_ranks_whose_queries_share_a_head_all_have_it(source, tp_size, heads):
    weights, spec = open_source(source)
    whole, bias = weights.matrix(ATTENTION + "k_proj.weight").values, weights.vector(ATTENTION + "k_proj.bias")
    for part, head in zip(all_parts(weights, spec, tp_size), heads, strict=True):
        rows = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        np.testing.assert_array_equal(part.matrix(ATTENTION + "k_proj.weight").values, whole[rows])
        np.testing.assert_array_equal(part.vector(ATTENTION + "k_proj.bias"), bias[rows])


def test_biases_are_split_with_outputs_and_whole_after_a_sum(source):
    weights, spec = open_source(source)
    parts = all_parts(weights, spec, 4)
    for name in (ATTENTION + "q_proj.bias", "model.layers.0.mlp.up_proj.bias"):
        np.testing.assert_array_equal(np.concatenate([part.vector(name) for part in parts]), weights.vector(name))
    for name in (ATTENTION + "o_proj.bias", "model.layers.0.mlp.down_proj.bias", "model.norm.weight"):
        assert all(np.array_equal(part.vector(name), weights.vector(name)) for part in parts)


@pytest.mark.parametrize("linears", [SCHEMES["none"], SCHEMES["int4, groups of 32"], SCHEMES["fp8 blocks"]])
def test_parts_are_views_of_the_mapped_file(source, tmp_path, text, linears):
    weights, spec = quantized(source, tmp_path / "out", text, linears)
    for part in all_parts(weights, spec, 2):
        for name in (ATTENTION + "q_proj.weight", ATTENTION + "o_proj.weight", spec.lm_head_name):
            values = part.matrix(name).values
            assert values.base is not None
            assert not values.flags.owndata


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_layers_and_the_ends_have_embedding_and_head(tmp_path, tied):
    save_model(tmp_path, "qwen2", num_hidden_layers=3, tie_word_embeddings=tied)
    weights, spec = open_source(tmp_path)
    parts = [ShardedWeights(weights, spec, rank) for rank in Parallelism(pp_size=3).ranks()]
    layers = [{int(name.split(".")[2]) for name in part.shapes if ".layers." in name} for part in parts]
    assert layers == [{0}, {1}, {2}]
    ends = [{name for name in part.shapes if ".layers." not in name} for part in parts]
    assert ends == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", spec.lm_head_name}]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_are_spread_and_split(tmp_path, family, ep_size):
    save_family(tmp_path, family)
    weights, spec = open_source(tmp_path)
    sparse = spec.mixture.sparse_layers.index(True)
    for rank in Parallelism(tp_size=4, ep_size=ep_size).ranks():
        part = ShardedWeights(weights, spec, rank)
        for index in range(4):
            down = f"model.layers.{sparse}.{spec.mixture.expert(index).down}.weight"
            assert (down in part.shapes) == (index // (4 // ep_size) == rank.tp_rank % ep_size)
            if down in part.shapes:
                size = spec.mixture.intermediate_size * ep_size // 4
                begin = rank.tp_rank // ep_size * size
                np.testing.assert_array_equal(
                    part.matrix(down).values, weights.matrix(down).values[:, begin : begin + size]
                )


@pytest.mark.parametrize("parallelism", [Parallelism(4, 1), Parallelism(2, 2), Parallelism(4, 2, 2)])
@pytest.mark.parametrize("family", ["llama", *MIXTURES])
def test_a_decoder_of_the_ranks_own_spec_asks_for_the_shapes_that_it_is_given(tmp_path, family, parallelism):
    save_family(tmp_path, family)
    weights, spec = open_source(tmp_path)
    for rank in parallelism.ranks():
        shapes = ShardedWeights(weights, spec, rank).shapes
        local = expected_weights(spec_of_rank(spec, rank))
        inner = {name: shape for name, shape in shapes.items() if ".layers." in name}
        assert inner == {name: local[name] for name in inner}
        vocabulary = [shape for name, shape in shapes.items() if name.startswith(("model.embed", "lm_head"))]
        assert all(shape == (96 // parallelism.tp_size, 64) for shape in vocabulary)


def test_damaged_values_are_found_by_the_rank_that_would_use_them(source, tmp_path):
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[ATTENTION + "q_proj.weight"][200, 3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    weights, spec = open_source(tmp_path)
    first, second = all_parts(weights, spec, 2)
    first.matrix(ATTENTION + "q_proj.weight")
    with pytest.raises(BuildError, match="NaN or infinity"):
        second.matrix(ATTENTION + "q_proj.weight")


def test_one_rank_has_all(source):
    weights, spec = open_source(source)
    part = ShardedWeights(weights, spec, Rank())
    assert part.shapes == weights.shapes
    assert spec_of_rank(spec, Rank()) == spec


@pytest.mark.parametrize("linears", [SCHEMES["none"], SCHEMES["int4, groups of 32"], SCHEMES["mxfp8"]])
def test_the_memory_of_a_build_is_estimated_from_the_ranks_own_bytes(source, tmp_path, text, linears):
    weights, spec = quantized(source, tmp_path / "out", text, linears)
    whole, *parts = (sum(rank_bytes(weights, spec, rank)) for rank in (Rank(), *Parallelism(2).ranks()))
    assert parts[0] == parts[1]
    assert whole / 2 <= parts[0] < whole / 2 * 1.05  # norms are on both
    assert whole < (tmp_path / "out" / "model.safetensors").stat().st_size
    assert (rank_bytes(weights, spec, Rank())[1] > 0) == (linears["scheme"] == "int4")
    estimates = [build_memory(weights, spec, Rank(), embedded=embedded) for embedded in (True, False)]
    assert all(2**29 < estimate < 2**32 for estimate in estimates)
