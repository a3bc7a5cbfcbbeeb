"""Precision chosen within a budget: the best choice there is, what a wrong recipe is told, and what is recorded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import tiny_config, tiny_weights, write_safetensors

import quantize
from plansmith_errors import CheckpointError, ConfigError, QuantizeError
from quantize.recipe import Recipe
from quantize.sensitivity.candidate import nearest_rule, round_unit
from quantize.sensitivity.knapsack import Choice, Knapsack, Option
from quantize.weight_rule import WeightRule
from quantize.yaml_model import validate

INT4, INT8, NONE = {"scheme": "int4", "group_size": 32}, {"scheme": "int8"}, {"scheme": "none"}
QKV = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]

Options = list[list[Option]]
errors = st.floats(0, 1, width=16)  # sums are exact, so that equal errors are equal
options = st.lists(st.builds(Option, st.integers(0, 40), errors), min_size=1, max_size=3)
units = st.lists(options, min_size=1, max_size=5)


def totals(units: Options, choice: Choice) -> tuple[int, float]:
    chosen = [column[index] for column, index in zip(units, choice, strict=True)]
    return sum(option.nbytes for option in chosen), sum(option.error for option in chosen)


@given(units=units, max_bytes=st.integers(0, 200), max_error=st.floats(0, 5, width=16))
@settings(deadline=None, max_examples=150)
def test_no_choice_is_better_than_the_one_made(units: Options, max_bytes: int, max_error: float) -> None:
    every = [totals(units, choice) for choice in itertools.product(*(range(len(column)) for column in units))]
    knapsack = Knapsack(units)
    fitting = [(error, nbytes) for nbytes, error in every if nbytes <= max_bytes]
    choice = knapsack.within_bytes(max_bytes)
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert totals(units, choice)[::-1] == min(fitting)
    good = [(nbytes, error) for nbytes, error in every if error <= max_error]
    choice = knapsack.within_error(max_error)
    assert (choice is None) == (not good)
    if choice is not None:
        assert totals(units, choice) == min(good)
    assert (knapsack.smallest, knapsack.least_error) == (min(every)[0], min(error for _, error in every))


@given(units=units, budgets=st.tuples(st.integers(0, 200), st.integers(0, 200)))
@settings(deadline=None)
def test_a_larger_budget_never_predicts_a_larger_error(units: Options, budgets: tuple[int, int]) -> None:
    small, large = (Knapsack(units).within_bytes(budget) for budget in sorted(budgets))
    if small is not None:
        assert large is not None and totals(units, large)[1] <= totals(units, small)[1]


def test_sizes_without_a_divisor_fit_and_are_all_but_the_best() -> None:
    rng = np.random.default_rng(0)
    units = [
        [Option(int(size), 1.0 / (index + 1)), Option(int(2.1 * size) + 1, 0.01)]
        for index, size in enumerate(rng.integers(10**8, 10**9, 60))
    ]
    knapsack = Knapsack(units)
    assert sum(knapsack.within_bytes(knapsack.largest) or ()) == len(units)
    middle = (knapsack.smallest + knapsack.largest) // 2
    choice = knapsack.within_bytes(middle)
    assert choice is not None
    used, error = totals(units, choice)
    # By error per byte, the last one a part of itself: no choice has less.
    steps = sorted(((a.error - b.error) / (b.nbytes - a.nbytes), b.nbytes - a.nbytes) for a, b in units)[::-1]
    bound, left = sum(a.error for a, _ in units), middle - knapsack.smallest
    for gain, size in steps:
        bound -= gain * min(size, left)
        left -= min(size, left)
    assert used <= middle and bound <= error < bound + 0.05


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        ({"budget": {"bits_per_weight": 5, "kl": 1}}, "names bits_per_weight, kl; name one of bits_per_weight, size"),
        ({"budget": {}}, "names nothing; name one of"),
        ({"budget": {"kl": 0.1}, "sensitivity": "output"}, "kl is measured by sensitivity kl, not output"),
        ({"candidates": [INT8, INT8]}, "two candidates are the same"),
        ({"candidates": [INT8]}, "'auto.candidates' is"),
        ({"budgets": {"kl": 1}}, "unknown key 'auto.budgets'; did you mean 'budget'"),
        ({"candidates": [INT8, {"scheme": "int8", "group_size": 32}]}, "group_size belongs to the scheme int4"),
    ],
)
def test_a_wrong_section_is_explained(auto: dict[str, Any], message: str) -> None:
    data = {"name": "x", "auto": {"candidates": [INT4, INT8], "budget": {"bits_per_weight": 5}, **auto}}
    with pytest.raises(ConfigError, match=message) as caught:
        validate(Recipe, data, "mine.yaml")
    assert "\n" not in str(caught.value)


def recipe(budget: dict[str, float], *candidates: dict[str, Any], **changes: Any) -> Recipe:
    auto = {"candidates": list(candidates or (INT4, INT8)), "budget": budget, "sensitivity": "weights"}
    return Recipe.model_validate({"name": "mine", "auto": auto, **changes})


def test_auto_and_linears_exclude_each_other_and_a_text_must_be_used() -> None:
    for changes, message in (({"linears": INT8}, "leave linears out"), ({"calibration": {"seed": 1}}, "no effect")):
        with pytest.raises(ValueError, match=message):
            recipe({"bits_per_weight": 5}, **changes)
    assert recipe({"bits_per_weight": 5}).record().keys() >= {"auto"}
    assert "linears" not in recipe({"bits_per_weight": 5}).record()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model", tiny_weights(), tiny_config())


RULES: list[dict[str, Any]] = [
    INT4,
    {**INT4, "symmetric": False, "scale": "mse"},
    {**INT4, "group_size": "channel"},
    INT8,
    {"scheme": "fp8"},
    {"scheme": "fp8", "granularity": "tensor"},
    {"scheme": "fp8", "granularity": "block"},
    {"scheme": "nvfp4", "scale": "mse"},
    {"scheme": "mxfp4"},
    {"scheme": "mxfp8"},
    NONE,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_a_candidate_is_judged_by_what_would_be_stored(source: Path, tmp_path: Path, rule: dict[str, Any]) -> None:
    quantize.quantize_checkpoint(source, tmp_path / "out", Recipe.model_validate({"name": "all", "linears": rule}))
    original, stored = quantize.open_checkpoint(source), quantize.open_checkpoint(tmp_path / "out")
    unit = {name: np.array(original.load_float32(name)) for name in QKV}
    rounded = round_unit(unit, WeightRule.model_validate(rule), original.kept_dtype)
    for name in QKV:
        np.testing.assert_array_equal(rounded.weights[name], quantize.load_weight(stored, name).dequantize())
    assert rounded.nbytes == sum(quantize.load_weight(stored, name).nbytes for name in QKV)


def test_a_calibrated_candidate_is_judged_by_rounding_to_nearest() -> None:
    gptq = WeightRule.model_validate({**INT4, "symmetric": False, "method": "gptq", "damping": 0.1})
    assert nearest_rule(gptq) == WeightRule(scheme="int4", group_size=32, symmetric=False)


def chosen(source: Path, output: Path, recipe: Recipe) -> dict[str, Any]:
    quantize.quantize_checkpoint(source, output, recipe)
    config: dict[str, Any] = quantize.open_checkpoint(output).config["quantization_config"]
    return config


def bits_of_linears(config: dict[str, Any], source: Path) -> float:
    sizes = {info.name: int(np.prod(info.shape)) for info in quantize.open_checkpoint(source)}
    linears = {name: entry for name, entry in config["tensors"].items() if name.endswith("_proj.weight")}
    bits = sum(sizes[name] * entry["bits_per_weight"] for name, entry in linears.items())
    return bits / sum(sizes[name] for name in linears)


@pytest.mark.parametrize("budget", [{"bits_per_weight": 6.0}, {"size_gb": 0.0001}])
def test_the_budget_is_kept_and_what_run_times_fuse_is_alike(
    source: Path, tmp_path: Path, budget: dict[str, float]
) -> None:
    config = chosen(source, tmp_path / "a", recipe(budget))
    schemes = {name: entry["scheme"] for name, entry in config["tensors"].items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        assert len({schemes[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"}) == 1
        assert len({schemes[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")}) == 1
    auto = config["auto"]
    stored = quantize.open_checkpoint(tmp_path / "a")
    assert auto["stored_bytes"] == sum(info.nbytes for info in stored)
    assert auto["bits_per_weight"] == pytest.approx(bits_of_linears(config, source), abs=1e-3)
    if "bits_per_weight" in budget:
        assert 5.0 < auto["bits_per_weight"] <= 6.0
    else:
        assert 0.00009 < auto["stored_bytes"] / 1e9 <= 0.0001
    assert {schemes[name] for name in schemes if name.endswith("_proj.weight")} == {"int4", "int8"}
    assert auto["sets"].keys() >= {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"}
    assert config["recipe"]["auto"]["budget"] == budget
    assert chosen(source, tmp_path / "b", recipe(budget)) == config
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_weights_that_four_bits_spoil_get_eight(source: Path, tmp_path: Path) -> None:
    weights = tiny_weights()
    planted = "model.layers.1.self_attn.o_proj.weight"
    weights[planted][:, ::32] *= 40  # one column of each group sets its scale; the rest is lost
    write_safetensors(source, weights, tiny_config())
    config = chosen(source, tmp_path / "out", recipe({"bits_per_weight": 5.4}))
    assert config["tensors"][planted]["scheme"] == "int8"


def test_overrides_settle_linears_before_the_choice(source: Path, tmp_path: Path) -> None:
    overrides = [{"match": "*.v_proj.weight", **NONE}, {"match": "*.down_proj.weight", **INT4}]
    config = chosen(source, tmp_path / "out", recipe({"bits_per_weight": 30}, overrides=overrides))
    schemes = {name: entry["scheme"] for name, entry in config["tensors"].items()}
    assert schemes[QKV[2]] == "none" and schemes["model.layers.0.mlp.down_proj.weight"] == "int4"
    assert schemes[QKV[0]] == schemes[QKV[1]] == "int8"
    assert config["auto"]["bits_per_weight"] == pytest.approx(bits_of_linears(config, source), abs=1e-3)
    everything = [{"match": "*", **INT8}]
    with pytest.raises(QuantizeError, match="auto has nothing to choose"):
        quantize.quantize_checkpoint(source, tmp_path / "no", recipe({"bits_per_weight": 5}, overrides=everything))


def test_what_cannot_be_reached_or_measured_is_refused(source: Path, tmp_path: Path) -> None:
    def refused(message: str, recipe: Recipe) -> None:
        with pytest.raises(QuantizeError, match=message) as caught:
            quantize.quantize_checkpoint(source, tmp_path / "out", recipe)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    refused("bits_per_weight 3 cannot be reached; the candidates give 4.5 to 8.4", recipe({"bits_per_weight": 3}))
    refused("size_gb 1e-06 cannot be reached; the candidates give", recipe({"size_gb": 1e-6}))
    refused("which group_size 128 does not divide", recipe({"bits_per_weight": 5}, {"scheme": "int4"}, INT8))
    measured = {"candidates": [INT4, INT8], "budget": {"bits_per_weight": 5}}
    refused(
        "pass calibration tools, or choose sensitivity weights", Recipe.model_validate({"name": "x", "auto": measured})
    )


def test_a_record_that_does_not_fit_is_one_line(source: Path, tmp_path: Path) -> None:
    config = chosen(source, tmp_path / "out", recipe({"bits_per_weight": 6}))
    record = quantize.read_choice(config, "here")
    assert record is not None and record.data() == config["auto"]
    assert quantize.read_choice({}, "here") is None and quantize.read_choice(None, "here") is None
    for damaged in ([], {**config["auto"], "candidates": ["int4"]}, {**config["auto"], "sets": {"x": 1}}):
        with pytest.raises(CheckpointError, match=r"here: quantization_config\.auto") as caught:
            quantize.read_choice({"auto": damaged}, "here")
        assert "\n" not in str(caught.value)
