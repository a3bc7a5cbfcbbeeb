"""A calibrated recipe in a build: what its result depends on, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import quantize
from plansmith.calibration import calibration_dependencies, calibration_tools
from plansmith.config import load_build_file
from plansmith.console import Console
from plansmith.options import GlobalOptions
from plansmith_errors import ConfigError, QuantizeError

AWQ, PLAIN = quantize.load_recipe("int4-awq"), quantize.load_recipe("int4-rtn")


def settings(text: Path, **changes: object) -> quantize.CalibrationSettings:
    return quantize.CalibrationSettings.model_validate({"text": text, **changes})


def test_another_text_another_seed_and_other_samples_make_another_result(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    first = calibration_dependencies(AWQ, settings(text))
    assert first == calibration_dependencies(AWQ, settings(text, max_seconds=3.0, max_activation_gb=0.0))
    assert first != calibration_dependencies(AWQ, settings(text, seed=1))
    assert first != calibration_dependencies(AWQ, settings(text, num_samples=3))
    assert first != calibration_dependencies(AWQ, None)
    text.write_text("two")
    assert first != calibration_dependencies(AWQ, settings(text))
    with pytest.raises(QuantizeError, match=r"absent\.txt: No such file"):
        calibration_dependencies(AWQ, settings(tmp_path / "absent.txt"))


def test_recipes_without_calibration_depend_on_nothing_more() -> None:
    assert calibration_dependencies(PLAIN, None) == {}
    assert calibration_tools(PLAIN, None, Console(GlobalOptions())) is None
    with pytest.raises(ConfigError, match="recipe 'int4-rtn' is not calibrated; choose one that is"):
        calibration_tools(PLAIN, quantize.CalibrationSettings(), Console(GlobalOptions()))


def test_the_text_of_a_build_file_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    path.write_text("model: m\nquantize: {recipe: int4-awq, calibration: {text: mine.txt, seed: 3}}\n")
    found = load_build_file(path).quantize.calibration
    assert found is not None and (found.text, found.seed) == (tmp_path / "mine.txt", 3)


def test_chat_turns_go_through_the_models_template(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    tools = calibration_tools(AWQ, None, Console(GlobalOptions()))
    assert tools is not None and tools.render_chat is not None
    turns = [{"role": "user", "content": "Hi"}]
    with pytest.raises(QuantizeError, match="no chat template"):
        tools.render_chat(quantize.open_checkpoint(tmp_path), turns)
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert tools.render_chat(quantize.open_checkpoint(tmp_path), turns) == "<s><user>Hi"
