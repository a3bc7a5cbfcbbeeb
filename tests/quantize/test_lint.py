"""The linter: quiet on everything that is whole, and it names each kind of damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import write_model, write_quantized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_weights, write_gguf

import quantize
from plansmith_errors import CheckpointError, PlansmithError
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import Finding, lint_checkpoint

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One whole checkpoint of every kind."""
    base = tmp_path_factory.mktemp("kinds")
    found = {"original": write_model(base / "original"), "qwen2": write_model(base / "qwen2", "qwen2")}
    found["gguf"] = write_gguf(base / "model.gguf", tiny_weights())
    for name in quantize.list_recipes():  # those that need no text
        recipe = quantize.load_recipe(name)
        if not recipe.needs_text:
            quantize.quantize_checkpoint(found["original"], base / f"recipe-{name}", recipe)
            found[f"recipe {name}"] = base / f"recipe-{name}"
    for kind in ("int4", "int4-asym", "int8", "fp8", "none"):
        found[kind] = write_quantized(base / kind, kind)
    layouts = {
        "trtllm": ["int4", "fp8", "none"],
        "compressed-tensors": ["int4", "int4-asym", "int8", "fp8"],
        "modelopt": ["int4", "fp8"],
    }
    for layout, recipes in layouts.items():
        for recipe in recipes:
            path = found[f"{layout} {recipe}"] = base / f"{layout}-{recipe}"
            tp_size, pp_size = (2, 2) if layout == "trtllm" else (1, 1)
            options = ExportOptions(layout, tp_size=tp_size, pp_size=pp_size)  # type: ignore[arg-type]
            export_checkpoint(found[recipe], path, options)
    return found


def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy", dirs_exist_ok=True))


def change(path: Path, file: str, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a file."""
    stored: dict[str, Any] = load_file(path / file) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path / file)


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_whole_checkpoints_of_every_kind_are_clean(kinds: dict[str, Path]) -> None:
    for kind, path in kinds.items():
        assert lint_checkpoint(path, check_values=path.is_dir()) == [], kind


@pytest.mark.parametrize(
    ("kind", "file", "name", "tensor", "expected"),
    [
        ("original", "model", GATE, None, f"missing: {GATE}: expected bfloat16 or"),
        ("original", "model", "model.layers.9.mlp.gate_proj.weight", torch.ones(2), "extra: model.layers.9."),
        ("original", "model", GATE, torch.ones(3, 256), f"shape: {GATE}: is [3, 256], expected [512, 256]"),
        ("original", "model", GATE, torch.ones(512, 256, dtype=torch.int8), f"dtype: {GATE}: is int8"),
        ("int4", "model", f"{GATE}_scale", None, f"missing: {GATE}_scale: expected float16 or float32 [512, 4]"),
        ("int4", "model", f"{GATE}_zero_point", torch.ones(1), f"extra: {GATE}_zero_point"),
        ("fp8", "model", f"{GATE}_scale", torch.ones(512), "is [512], expected [512, 1]"),
        ("trtllm int4", "rank3", "transformer.layers.0.mlp.gate.weight", None, "missing: rank3: transformer.layers.0"),
        ("trtllm fp8", "rank0", "transformer.layers.1.attention.qkv.per_channel_scale", torch.ones(5), "is [5]"),
        ("trtllm none", "rank1", "transformer.layers.0.mlp.fc.weight", torch.ones(256, 256), "dtype: rank1: "),
        ("trtllm none", "rank2", "transformer.vocab_embedding.weight", torch.ones(99, 256), "extra: rank2: "),
        ("compressed-tensors int4", "model", f"{GATE}_packed", torch.ones(512, 32), "is float32, expected int32"),
        ("compressed-tensors int4-asym", "model", f"{GATE}_zero_point", None, "missing: "),
        ("modelopt int4", "model", GATE, torch.ones(512, 128, dtype=torch.uint8), "expected [256, 256]"),
    ],
)
def test_each_kind_of_damage_is_named(
    kinds: dict[str, Path], tmp_path: Path, kind: str, file: str, name: str, tensor: torch.Tensor | None, expected: str
) -> None:
    path = copy(kinds[kind], tmp_path)
    change(path, f"{file}.safetensors", **{name: tensor})
    findings = lint_checkpoint(path)
    assert [expected in str(finding) for finding in findings] == [True], findings


@pytest.mark.parametrize(
    ("kind", "file", "name", "value", "expected"),
    [
        ("original", "model", GATE, float("nan"), f"value: {GATE}: 1 of 131072 values are not finite"),
        ("int4", "model", f"{GATE}_scale", 0.0, f"scale: {GATE}_scale: 1 of 2048 scales are zero or negative"),
        ("trtllm fp8", "rank1", "transformer.layers.0.mlp.proj.per_channel_scale", 0.0, "scale: rank1: "),
        ("trtllm fp8", "rank1", "transformer.layers.0.mlp.proj.weight", float("nan"), "value: rank1: "),
        ("compressed-tensors int8", "model", f"{GATE}_scale", float("inf"), "not finite"),
    ],
)
def test_values_are_read_when_asked(
    kinds: dict[str, Path], tmp_path: Path, kind: str, file: str, name: str, value: float, expected: str
) -> None:
    path = copy(kinds[kind], tmp_path)
    tensor = load_file(path / f"{file}.safetensors")[name]
    tensor.view(-1)[7] = value
    change(path, f"{file}.safetensors", **{name: tensor})
    assert lint_checkpoint(path) == [], "headers alone do not tell"
    assert [expected in str(finding) for finding in lint_checkpoint(path, check_values=True)] == [True]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_lost_cut_or_retyped_tensor_goes_unseen(kinds: dict[str, Path], tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(set(kinds) - {"gguf"})))
    path = copy(kinds[kind], tmp_path)
    file = data.draw(st.sampled_from(sorted(path.glob("*.safetensors"))))
    tensors = load_file(file)
    name = data.draw(st.sampled_from(sorted(tensors)))
    damage = data.draw(st.sampled_from(["lose", "cut", "retype"]))
    if damage == "lose":
        del tensors[name]
    elif damage == "cut" and tensors[name].ndim:
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors[name] = tensors[name].to(torch.int16)
    save_file(tensors, file)
    findings = lint_checkpoint(path)
    assert len(findings) == 1 and name in findings[0].where
    shutil.rmtree(path)


def test_missing_and_truncated_ranks(kinds: dict[str, Path], tmp_path: Path) -> None:
    path = copy(kinds["trtllm int4"], tmp_path)
    (path / "rank2.safetensors").unlink()
    whole = (path / "rank1.safetensors").read_bytes()
    (path / "rank1.safetensors").write_bytes(whole[:-10])
    first, second = lint_checkpoint(path, check_values=True)
    assert (first.kind, first.where) == ("file", "rank1.safetensors") and "truncated" in first.message
    assert (second.kind, second.where) == ("file", "rank2.safetensors")


def test_cuts_that_cannot_work(kinds: dict[str, Path]) -> None:
    (finding,) = lint_checkpoint(kinds["int4"], tp_size=16)
    assert finding.kind == "shard" and "legal (tp, group) pairs: (1, 64), (1, 128), (2, 64), (4, 64)" in str(finding)
    assert lint_checkpoint(kinds["int4"], tp_size=4, pp_size=3) == []
    assert "legal tp: 1, 2, 4, 8" in str(lint_checkpoint(kinds["original"], tp_size=3)[0])
    (finding,) = lint_checkpoint(kinds["trtllm fp8"], tp_size=4)
    assert finding == Finding("shard", "mapping.tp_size", "is 2, asked for 4; export again with that cut")


def test_a_config_that_the_loader_would_stumble_over(kinds: dict[str, Path], tmp_path: Path) -> None:
    path = copy(kinds["trtllm fp8"], tmp_path)
    config = json.loads((path / "config.json").read_text())
    change_config(
        path, quantization={**config["quantization"], "bits": 8}, mapping={**config["mapping"], "world_size": 8}
    )
    assert [finding.where for finding in lint_checkpoint(path)] == ["quantization.bits", "mapping.world_size"]
    change_config(path, mapping={**config["mapping"], "world_size": 6, "tp_size": 3})
    assert "do not divide over tp 3" in str(lint_checkpoint(path)[-1])
    change_config(path, mapping={**config["mapping"], "tp_size": 10**6, "world_size": 10**6})
    assert lint_checkpoint(path)[-1].kind == "shard", "and no memory is taken for a million ranks"


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ("FP8", {}, "transformer.layers.0.attention.qkv.activation_scaling_factor: expected float32 [1]"),
        ("W8A8_SQ_PER_CHANNEL", {}, "transformer.layers.0.mlp.proj.prequant_scaling_factor"),
        ("W4A16_AWQ", {"pre_quant_scale": True, "group_size": 64}, "prequant_scaling_factor: expected bfloat16 or"),
        ("FP8_PER_CHANNEL_PER_TOKEN", {"kv_cache_quant_algo": "FP8"}, "attention.kv_cache_scaling_factor"),
        ("FP8", {"exclude_modules": ["transformer.ln_f"]}, "lm_head.weights_scaling_factor"),
    ],
)
def test_what_other_quantizations_of_tensorrt_llm_need(
    kinds: dict[str, Path], tmp_path: Path, algorithm: str, changes: dict[str, Any], expected: str
) -> None:
    path = copy(kinds["trtllm fp8"], tmp_path)
    change_config(path, quantization={"quant_algo": algorithm, "exclude_modules": ["lm_head"], **changes})
    assert any(expected in str(finding) for finding in lint_checkpoint(path))


def test_a_group_that_does_not_divide_is_one_finding_per_layer(kinds: dict[str, Path], tmp_path: Path) -> None:
    path = copy(kinds["int4"], tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["tensors"][GATE]["group_size"] = 192
    change_config(path, **config)
    (finding,) = lint_checkpoint(path, check_values=True)
    assert str(finding) == f"config: {GATE}: has 256 inputs, which groups of 192 do not divide"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 key-value heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits is None, expected 4 in AWQ files"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups is None, expected a mapping"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo is None, expected one of"),
        ({"quantization_config": {"quant_method": "hqq"}}, "is quantized by 'hqq', which cannot be read"),
        ({"quantization_config": 3}, "expected a mapping"),
    ],
)
def test_unreadable_configs_are_one_clear_line(
    kinds: dict[str, Path], tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    path = copy(kinds["original"], tmp_path)
    change_config(path, **changes)
    with pytest.raises(CheckpointError) as error:
        lint_checkpoint(path)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_many_layers_in_a_config_take_no_time(kinds: dict[str, Path], tmp_path: Path) -> None:
    path = copy(kinds["original"], tmp_path)
    change_config(path, num_hidden_layers=2**31 - 1)
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        lint_checkpoint(path)


JUNK = st.sampled_from([None, "", "text", -1, 0, 1.5, True, [], [1], {}, {"a": 1}, {"tp_size": []}, 10**30])
KINDS = ["original", "int4", "trtllm int4", "compressed-tensors int4", "modelopt fp8"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_junk_in_any_config_is_findings_or_one_clear_line(damaged: dict[str, Path], data: st.DataObject) -> None:
    path = damaged[data.draw(st.sampled_from(KINDS))]
    file = path / "config.json"
    original = file.read_text()
    config = json.loads(original)
    owner = config
    for section in ("quantization_config", "quantization", "mapping", "config_groups", "group_0", "weights", "tensors"):
        if isinstance(owner.get(section), dict) and data.draw(st.booleans()):
            owner = owner[section]
    owner[data.draw(st.sampled_from(sorted(owner)))] = data.draw(JUNK)
    file.write_text(json.dumps(config))
    try:
        assert all("\n" not in str(finding) for finding in lint_checkpoint(path, tp_size=2))
    except PlansmithError as error:
        assert "\n" not in str(error)
    finally:
        file.write_text(original)


@pytest.fixture(scope="module")
def damaged(kinds: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("damaged")
    return {kind: Path(shutil.copytree(kinds[kind], base / kind)) for kind in KINDS}
