"""A layer's weights in calibration keep every digit until they are settled, in no more bytes than those need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from calibrated_llama import save_with_tokenizer

import builder
import quantize
from builder.targets.reference.window_weights import Bfloat16Weights
from quantize import LayerWeights


def matrix(dtype: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Whose values are all of that type."""
    values = np.random.default_rng(0).normal(size=(300, 8)).astype(dtype)
    return np.asarray(values, np.float32)


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(ml_dtypes.bfloat16, 2), (np.float16, 2), (np.float32, 4)], ids=["bf16", "fp16", "fp32"]
)
def test_a_matrix_is_read_as_it_was_set(dtype: Any, nbytes: int) -> None:
    values = matrix(dtype)
    weights = Bfloat16Weights([("w", values), ("norm", np.full(8, 1 / 3, np.float32))])
    np.testing.assert_array_equal(weights["w"], values)
    np.testing.assert_array_equal(weights["norm"], np.full(8, 1 / 3, np.float32))
    assert weights.shape("w") == (300, 8) and weights.shape("norm") == (8,) and set(weights) == {"w", "norm"}
    assert weights._matrices["w"].element_size() == nbytes


def test_linears_multiply_what_was_set_last() -> None:
    weights = Bfloat16Weights([("w", matrix(np.float32))])
    assert torch.equal(weights.bfloat16("w"), torch.from_numpy(matrix(np.float32)).bfloat16())
    weights["w"] = weights["w"] * 3
    assert torch.equal(weights.bfloat16("w"), (torch.from_numpy(matrix(np.float32)) * 3).bfloat16())
    weights.settle("w", weights["w"] / 7)
    rounded = (torch.from_numpy(matrix(np.float32)) * 3 / 7).bfloat16()
    assert torch.equal(weights.bfloat16("w"), rounded)
    np.testing.assert_array_equal(weights["w"], rounded.float().numpy())
    del weights["w"]
    assert not weights


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_scaling_is_that_of_the_values(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    columns, rows = rng.lognormal(size=8).astype(np.float32), rng.lognormal(size=300)
    plain, compact = LayerWeights([("w", matrix(dtype))]), Bfloat16Weights([("w", matrix(dtype))])
    for weights in (plain, compact):
        weights.scale_columns("w", columns)
        weights.scale_rows("w", rows)
    np.testing.assert_array_equal(compact["w"], plain["w"])
    assert torch.equal(compact.bfloat16("w"), torch.from_numpy(plain["w"]).bfloat16())
    compact.settle("w", plain["w"])
    assert torch.equal(compact.bfloat16("w"), torch.from_numpy(plain["w"]).bfloat16())


def test_a_layer_is_multiplied_in_the_precision_of_its_calibration(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path)
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    hidden = runner.embed(np.arange(40))
    exact = runner.run_layer(0, runner.layer_weights(0), hidden)
    with runner.calibrating("bfloat16"):
        weights = runner.layer_weights(0)
        found = runner.run_layer(0, weights, hidden)
    assert isinstance(weights, Bfloat16Weights) and not isinstance(runner.layer_weights(0), Bfloat16Weights)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < 2e-2
