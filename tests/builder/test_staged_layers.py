"""A layer that all windows go through in stages is the layer that one window goes through at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text
from tiny_models import FAMILIES_WITH_TRAITS, MIXTURES, random_ids

import builder
import quantize
from quantize.calibration.shelf import Shelf, Shelved
from quantize.calibration.stages import Stages

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, sliding window": ("mistral", {"sliding_window": 23}),
    **FAMILIES_WITH_TRAITS,
    **MIXTURES,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_bytes", [1e9, 0])
def test_stages_compute_what_a_run_computes(tmp_path: Path, family: str, max_bytes: float) -> None:
    save_with_tokenizer(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    hidden = [runner.embed(ids) for ids in random_ids(3, 60)]
    met: list[str] = []
    shelf = Shelf(max_bytes, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        stages = Stages(len(hidden), pool, shelf, lambda weight, inputs: met.append(weight))
        for layer in range(runner.num_layers):
            weights = runner.layer_weights(layer)
            run = runner.stage_layer(layer, weights, 60, hidden.__getitem__, stages)
            staged = [run(window) for window in range(len(hidden))]
            hidden = [runner.run_layer(layer, weights, window) for window in hidden]
            for found, expected in zip(staged, hidden, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert met[:2] == ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
    assert len(met) == len(set(met)), "inputs that several linears read are gathered once"
    shelf.close()


def test_weights_that_change_between_stages_are_those_that_go_on(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path)
    runner = builder.calibration_runner(quantize.open_checkpoint(tmp_path))
    hidden = runner.embed(random_ids(1)[0])
    weights = runner.layer_weights(0)
    halved = {name: array / 2 if name.endswith("proj.weight") else array for name, array in weights.items()}

    def halve(weight: str, inputs: Sequence[Shelved]) -> None:
        names = [weight.replace("q_proj", name) for name in ("q_proj", "k_proj", "v_proj")]
        names += [weight.replace("gate_proj", name) for name in ("gate_proj", "up_proj")]
        weights.update({name: halved[name] for name in names})

    with ThreadPoolExecutor(2) as pool:
        stages = Stages(1, pool, Shelf(1e9, tmp_path), halve)
        found = runner.stage_layer(0, weights, len(hidden), lambda window: hidden, stages)(0)
    np.testing.assert_allclose(found, runner.run_layer(0, halved, hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_tokenizer(tmp_path / "model")
    recipe = calibrated(method, write_text(tmp_path / "words.txt"))
    files = []
    for cores in (1, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        output = tmp_path / str(cores)
        quantize.quantize_checkpoint(tmp_path / "model", output, recipe, calibration_tools=TOOLS)
        files.append((output / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_bfloat16_products_leave_the_errors_as_they_are_and_are_recorded(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model")
    text = write_text(tmp_path / "words.txt")
    errors = []
    for precision in ("float32", "bfloat16"):
        recipe, output = calibrated("gptq", text, precision=precision), tmp_path / precision
        report = quantize.quantize_checkpoint(tmp_path / "model", output, recipe, calibration_tools=TOOLS)
        config = quantize.open_checkpoint(output).config
        assert config["quantization_config"]["calibration"]["precision"] == precision
        errors.append([tensor.output_error for tensor in report.tensors if tensor.output_error is not None])
    assert len(errors[0]) == 14
    np.testing.assert_allclose(*errors, rtol=0.1)
