"""Recipes: the built-in ones, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantize
from plansmith_errors import ConfigError
from quantize.weight_rule import WeightRule


def test_built_in_recipes() -> None:
    floats = ["fp8", "fp8-block", "fp8-tensor", "mxfp4", "mxfp8", "nvfp4"]
    calibrated = [
        "int4-awq",
        "int4-gptq",
        "int4-importance",
        "w4a8-awq",
        "int8-sq",
        "int8-kv8",
        "fp8-static",
        "fp8-kv8",
    ]
    calibrated.append("nvfp4-w4a4")
    plain = ["int4-rtn", "int4-rtn-sym", "int8", "mixed-auto", "none"]
    assert quantize.list_recipes() == sorted([*floats, *calibrated, *plain])
    for name in quantize.list_recipes():
        recipe = quantize.load_recipe(name)
        assert recipe.name == name
        assert recipe.is_calibrated == (name in calibrated)
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
        ("name: x\nlinears: {scheme: fp8, share_scale: true}", "share_scale is for granularity tensor"),
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


def test_a_calibration_text_lies_beside_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nlinears: {scheme: int4, method: gptq}\ncalibration: {text: mine.txt}")
    recipe = quantize.load_recipe(str(path))
    assert recipe.calibration is not None and recipe.calibration.text == tmp_path / "mine.txt"
    int4 = recipe.linears.int4
    assert int4 is not None and (int4.act_order, int4.damping, int4.scale) == (True, 0.05, "mse")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_recipe_extends_another_and_says_only_what_differs(tmp_path: Path) -> None:
    base = write(
        tmp_path / "base.yaml",
        "{name: base, linears: {scheme: int4, group_size: 64, method: gptq}, embeddings: {scheme: int8}, "
        "calibration: {text: words.txt, num_samples: 4}, overrides: [{match: '*.layers.0.*', scheme: int8}]}",
    )
    path = write(
        tmp_path / "mine.yaml",
        "{name: mine, extends: base.yaml, linears: {group_size: 32}, calibration: {num_samples: 8}, "
        "overrides: [{match: '*.layers.0.mlp.*', scheme: none}], kv_cache: fp8}",
    )
    base_recipe, mine = quantize.load_recipe(base), quantize.load_recipe(path)
    assert (mine.name, mine.kv_cache, mine.embeddings.scheme) == ("mine", "fp8", "int8")
    assert mine.linears == base_recipe.linears.model_copy(update={"group_size": 32})
    assert [override.match for override in mine.overrides] == ["*.layers.0.*", "*.layers.0.mlp.*"]
    assert mine.calibration is not None
    assert (mine.calibration.num_samples, mine.calibration.text) == (8, tmp_path / "words.txt")


def test_a_rule_of_another_scheme_takes_nothing_over(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "{name: mine, extends: int4-gptq, linears: {scheme: fp8}}")
    recipe = quantize.load_recipe(path)
    assert recipe.linears == WeightRule(scheme="fp8")
    assert recipe.embeddings.scheme == "int8"


def test_a_build_file_may_hold_the_recipe(tmp_path: Path) -> None:
    recipe = quantize.load_recipe({"extends": "int4-rtn", "linears": {"group_size": 32}})
    assert (recipe.name, recipe.linears.group_size, recipe.linears.symmetric) == ("int4-rtn", 32, False)
    assert quantize.load_recipe({"linears": {"scheme": "int8"}}).name == "custom"


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "{name: a, extends: b.yaml, linears: {scheme: fp8}}")
    path = write(tmp_path / "b.yaml", "{name: b, extends: a.yaml}")
    with pytest.raises(ConfigError, match="extends itself"):
        quantize.load_recipe(path)
    with pytest.raises(ConfigError, match=r"extends is 3, expected a recipe's name"):
        quantize.load_recipe(write(tmp_path / "c.yaml", "{name: c, extends: 3}"))
    with pytest.raises(ConfigError, match="did you mean 'int4-rtn'"):
        quantize.load_recipe(write(tmp_path / "d.yaml", "{name: d, extends: int4rtn}"))
