"""A calibrated run that was stopped goes on at the layer where it was, with that layer's own inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated_llama import calibrated, save_with_tokenizer, write_text

import builder
import quantize

LAYERS = 4


class StoppedError(Exception):
    pass


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


class CountedRunner:
    """Which layers were run."""

    def __init__(self, checkpoint: quantize.Checkpoint, layers: list[int]) -> None:
        self._runner = builder.calibration_runner(checkpoint)
        self._layers = layers

    def layer_weights(self, layer: int) -> dict[str, object]:
        self._layers.append(layer)
        return self._runner.layer_weights(layer)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_with_tokenizer(path, num_hidden_layers=LAYERS)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def run(
    source: Path, output: Path, recipe: quantize.Recipe, state: Path | None = None, stop_at: int | None = None
) -> list[int]:
    """The layers that were run."""
    layers: list[int] = []

    def progress(done: int, total: int, name: str) -> None:
        if done == stop_at:
            raise StoppedError

    tools = quantize.CalibrationTools(lambda checkpoint: CountedRunner(checkpoint, layers))
    resume = quantize.Resume(state, "the same") if state is not None else None
    quantize.quantize_checkpoint(source, output, recipe, progress=progress, calibration_tools=tools, resume=resume)
    return layers


@pytest.mark.parametrize("method", ["importance", "awq", "gptq"])
@pytest.mark.parametrize("max_activation_gb", [1.0, 0.0])
def test_finished_layers_are_not_run_again_and_the_bytes_are_the_same(
    source: Path, text: Path, tmp_path: Path, method: str, max_activation_gb: float
) -> None:
    recipe = calibrated(method, text, max_activation_gb=max_activation_gb)
    assert run(source, tmp_path / "whole", recipe) == list(range(LAYERS))
    whole = contents(tmp_path / "whole")
    names = list(quantize.open_checkpoint(source).names())
    for stop_at in (1, 2, 4, 11, 12, 20, 21, 30, len(names)):
        output, state = tmp_path / f"out{stop_at}", tmp_path / f"state{stop_at}"
        with pytest.raises(StoppedError):
            run(source, output, recipe, state, stop_at)
        layers = run(source, output, recipe, state)
        assert contents(output) == whole
        num_before = len(names) - 9 * LAYERS
        assert layers == list(range(max(stop_at - num_before, 0) // 9, LAYERS))


def test_a_run_whose_activations_are_gone_starts_anew(
    source: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = calibrated("importance", text)
    run(source, tmp_path / "whole", recipe)
    with pytest.raises(StoppedError):
        run(source, tmp_path / "out", recipe, tmp_path / "state", 25)
    kept = sorted(file.name for file in (tmp_path / "state").glob("hidden-*"))
    assert len(kept) == 2
    for name in kept:
        (tmp_path / "state" / name).unlink()
    assert run(source, tmp_path / "out", recipe, tmp_path / "state") == list(range(LAYERS))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert "the activations of the run before are missing" in caplog.text


@pytest.mark.parametrize("stop_at", [2, 12, 21, 38])
def test_scales_of_inputs_keys_and_values_are_those_of_a_run_that_was_not_stopped(
    source: Path, text: Path, tmp_path: Path, stop_at: int
) -> None:
    recipe = quantize.Recipe.model_validate(
        {
            "name": "static",
            "linears": {"scheme": "int8", "activations": "int8", "smoothing": 0.5, "fold_smoothing": False},
            "kv_cache": "fp8",
            "calibration": {"text": text, "num_samples": 4, "sequence_length": 64},
        }
    )
    run(source, tmp_path / "whole", recipe)
    with pytest.raises(StoppedError):
        run(source, tmp_path / "out", recipe, tmp_path / "state", stop_at)
    assert len(run(source, tmp_path / "out", recipe, tmp_path / "state")) < LAYERS + (stop_at < 12)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
