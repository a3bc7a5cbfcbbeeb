"""Proof of quantization: the figures are those of the stored bytes."""

import json

import numpy as np
import pytest
from tiny_checkpoints import tiny_config, tiny_weights, write_safetensors

from plansmith_errors import CheckpointError
from quantize import (
    Recipe,
    checkpoint_weights,
    described_weights,
    load_weight,
    open_checkpoint,
    quantize_checkpoint,
    scheme_totals,
    worst_weights,
)

RECIPE = Recipe(
    name="mixed",
    linears={"scheme": "int4", "group_size": 32, "symmetric": False},
    embeddings={"scheme": "int8"},
    overrides=[
        {"match": "*.layers.0.*", "scheme": "int4", "group_size": 64},
        {"match": "*.v_proj.*", "scheme": "none"},
    ],
)


@pytest.fixture(scope="module")
def source():
    return tiny_weights()


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, source):
    path = tmp_path_factory.mktemp("model")
    write_safetensors(path / "source", source)
    quantize_checkpoint(path / "source", path / "quantized", RECIPE)
    return path / "quantized"


def test_every_matrix_is_listed_with_its_stored_bytes_and_its_true_error(quantized, source):
    checkpoint = open_checkpoint(quantized)
    found = {weight.name: weight for weight in checkpoint_weights(checkpoint)}
    matrices = {name: value for name, value in source.items() if value.ndim == 2}
    assert set(found) == set(matrices)
    sizes = {info.name: info.nbytes for info in checkpoint}
    for name, value in matrices.items():
        error = np.linalg.norm(value - load_weight(checkpoint, name).dequantize()) / np.linalg.norm(value)
        assert found[name].relative_error == pytest.approx(error, rel=1e-3)
        assert found[name].num_weights == value.size
        assert found[name].nbytes == sum(sizes.get(name + part, 0) for part in ("", "_scale", "_zero_point"))
    assert found["model.layers.1.mlp.up_proj.weight"].bits_per_weight == 4 + (16 + 8) / 32


def test_totals_tell_schemes_and_groups_apart_and_add_up(quantized):
    weights = checkpoint_weights(open_checkpoint(quantized))
    totals = {total.kind: total for total in scheme_totals(weights)}
    assert {kind: total.num_tensors for kind, total in totals.items()} == {
        "int4 g32": 6,
        "int4 g64": 6,
        "none": 2,
        "int8": 1,
    }
    assert sum(total.nbytes for total in totals.values()) == sum(weight.nbytes for weight in weights)
    assert totals["none"].relative_error == 0 and totals["none"].bits_per_weight == 32
    members = [weight for weight in weights if weight.kind == "int4 g32"]
    low, high = (pick(weight.relative_error for weight in members) for pick in (min, max))
    assert low < totals["int4 g32"].relative_error < high
    worst = worst_weights(weights, 100)
    assert len(worst) == 13 and worst[0].relative_error == max(weight.relative_error for weight in weights)


def test_an_engines_copy_of_the_description_says_the_same(quantized, source):
    checkpoint = open_checkpoint(quantized)
    shapes = {name: value.shape for name, value in source.items()}
    described = described_weights(checkpoint.config["quantization_config"], shapes, "engine")
    for ours, stored in zip(described, checkpoint_weights(checkpoint), strict=True):
        assert (ours.name, ours.kind, ours.relative_error) == (stored.name, stored.kind, stored.relative_error)
        assert ours.nbytes == pytest.approx(stored.nbytes, rel=1e-5)


@pytest.mark.parametrize("description", [None, {"quant_method": "gptq", "bits": 4}])
def test_what_plansmith_did_not_quantize_has_no_proof(tmp_path, description):
    extra = {} if description is None else {"quantization_config": description}
    path = write_safetensors(tmp_path / "model", tiny_weights(), tiny_config(**extra))
    assert checkpoint_weights(open_checkpoint(path)) == []


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], "tensors is not an object of objects"),
        ({"a": 3}, "tensors is not an object of objects"),
        ({"absent.weight": {"scheme": "int8"}}, "has no tensor 'absent.weight'"),
        ({"model.norm.weight": {"scheme": "none", "relative_error": 0}}, "has bits_per_weight None, expected a number"),
        (
            {"model.norm.weight": {"scheme": "none", "bits_per_weight": 4, "relative_error": float("nan")}},
            "has relative_error nan, expected a number",
        ),
        (
            {"model.norm.weight": {"scheme": "none", "bits_per_weight": 4, "relative_error": 0, "group_size": "x"}},
            "group_size 'x'; quantize the checkpoint again",
        ),
    ],
)
def test_a_broken_description_is_answered_with_one_line(tmp_path, tensors, expected):
    config = {"quant_method": "plansmith", "format_version": 1, "tensors": tensors}
    path = write_safetensors(tmp_path / "model", tiny_weights(), tiny_config())
    (path / "config.json").write_text(json.dumps(tiny_config(quantization_config=config)))
    with pytest.raises(CheckpointError, match=expected) as error:
        checkpoint_weights(open_checkpoint(path))
    assert "\n" not in str(error.value)
