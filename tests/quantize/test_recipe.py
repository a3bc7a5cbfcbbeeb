"""Recipes: the built-in ones, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantize
from plansmith_errors import ConfigError


def test_built_in_recipes() -> None:
    floats = ["fp8", "fp8-block", "fp8-tensor", "mxfp4", "mxfp8", "nvfp4"]
    calibrated = ["int4-awq", "int4-gptq", "int4-importance"]
    assert quantize.list_recipes() == sorted([*floats, *calibrated, "int4-rtn", "int4-rtn-sym", "int8", "none"])
    for name in quantize.list_recipes():
        assert quantize.load_recipe(name).name == name
    int4 = quantize.load_recipe("int4-rtn").linears.int4
    assert int4 is not None and (int4.group_size, int4.symmetric, int4.scale) == (64, False, "absmax")


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'int4-rtn'"):
        quantize.load_recipe("int4rtn")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\nlinears: {scheme: int4, groupsize: 64}",
            "unknown key 'linears.groupsize'; did you mean 'group_size'",
        ),
        ("name: x\nlinears: {scheme: int3}", "'linears.scheme' is 'int3'"),
        ("name: x\nlinears: {scheme: int4, group_size: 100}", "'linears.group_size' is 100"),
        ("name: x\nlinears: {scheme: fp8, group_size: 64}", "group_size belongs to the scheme int4"),
        ("name: x\nlinears: {scheme: int8, scale: mse}", "scale belongs to the scheme int4 or nvfp4 or mxfp4"),
        ("name: x\nlinears: {scheme: nvfp4, scale: ocp}", "is none of nvfp4's: absmax, four-over-six, mse"),
        ("name: x\nlinears: {scheme: nvfp4, group_size: 32}", "group_size belongs to the scheme int4"),
        ("name: x\nlinears: {scheme: mxfp8, scale: ceil}", "scale belongs to .* and has no meaning for mxfp8"),
        ("name: x\nlinears: {scheme: int8, granularity: tensor}", "granularity belongs to the scheme fp8"),
        ("name: x\nlinears: {scheme: int8, method: awq}", "method belongs to the scheme int4"),
        ("name: x\nlinears: {scheme: int4, method: awq, damping: 0.1}", "damping belongs to the method gptq"),
        ("name: x\nlinears: {scheme: int4, method: importance, scale: absmax}", "importance needs scale mse"),
        ("name: x\nlinears: {scheme: int4}\ncalibration: {seed: 1}", "calibration has no effect without a method"),
        ("name: x\nlinears: {scheme: int8}\nlm_head: {scheme: int4, method: awq}", "lm_head: method awq is for"),
        ("linears: {scheme: int8}", "'name' is missing"),
        ("name: x\nname: y\nlinears: {scheme: int8}", "duplicate key 'name'"),
        ("name: x\nlinears: {scheme: int8}\noverrides: [{scheme: int8}]", "match' is missing"),
    ],
)
def test_a_wrong_recipe_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        quantize.load_recipe(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        quantize.load_recipe(str(tmp_path / "mine.yaml"))


def test_a_calibration_text_lies_beside_its_recipe_and_is_recorded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nlinears: {scheme: int4, method: gptq}\ncalibration: {text: mine.txt}")
    recipe = quantize.load_recipe(str(path))
    assert recipe.calibration is not None and recipe.calibration.text == tmp_path / "mine.txt"
    assert recipe.record()["calibration"]["text"] == "mine.txt"
    int4 = recipe.linears.int4
    assert int4 is not None and (int4.act_order, int4.damping, int4.scale) == (True, 0.05, "mse")
