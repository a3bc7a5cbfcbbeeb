"""Phi-3, Gemma and Granite all the way: quantized, calibrated, exported, linted, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrated_llama import TOOLS, calibrated, save_with_tokenizer, write_text
from safetensors.numpy import load_file
from tiny_models import FAMILIES_WITH_TRAITS, PHI3, VOCAB_SIZE, expected_logits, random_ids, run_mixed, save_model

import builder
import quantize
from builder.parallel import Parallelism
from builder.targets.reference.ranks import RankedReference
from plansmith_errors import CheckpointError, ExportError
from plugins.inflight_batching.step import EngineLimits
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.recipe import Recipe

INT4 = {"scheme": "int4", "group_size": 32, "symmetric": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


def recipe(linears: dict[str, Any], **others: Any) -> Recipe:
    return Recipe.model_validate({"name": "test", "linears": linears, **others})


def quantize_calibrated(source: Path, output: Path, text: Path, linears: dict[str, Any], **others: Any) -> None:
    settings = {"text": text, "num_samples": 4, "sequence_length": 64}
    calibrated_recipe = recipe(linears, **others)
    if calibrated_recipe.is_calibrated:
        calibrated_recipe = recipe(linears, **others, calibration=settings)
    quantize.quantize_checkpoint(source, output, calibrated_recipe, calibration_tools=TOOLS)


def logits(checkpoint: Path, ids: np.ndarray) -> np.ndarray:
    return run_mixed(builder.load_reference(checkpoint, num_blocks=12), ids)


@pytest.mark.parametrize(("method", "family"), [*(("awq", name) for name in FAMILIES_WITH_TRAITS), ("gptq", "gemma3")])
def test_calibration_gains_over_rounding_to_nearest(tmp_path: Path, text: Path, family: str, method: str) -> None:
    model_type, settings = FAMILIES_WITH_TRAITS[family]
    model = save_with_tokenizer(tmp_path / "source", model_type, **settings)
    quantize.quantize_checkpoint(tmp_path / "source", tmp_path / "rtn", recipe(INT4))
    quantize.quantize_checkpoint(
        tmp_path / "source", tmp_path / method, calibrated(method, text), calibration_tools=TOOLS
    )
    ids = random_ids()
    expected = expected_logits(model, ids)
    rounded, found = (np.linalg.norm(logits(tmp_path / name, ids) - expected) for name in ("rtn", method))
    assert found < rounded < np.linalg.norm(expected)
    assert lint_checkpoint(tmp_path / method) == []


@pytest.mark.parametrize("family", FAMILIES_WITH_TRAITS)
def test_smoothing_leaves_the_function_as_it_was(tmp_path: Path, text: Path, family: str) -> None:
    model_type, settings = FAMILIES_WITH_TRAITS[family]
    model = save_with_tokenizer(tmp_path / "source", model_type, **settings)
    smoothed = {"scheme": "int8", "activations": "int8", "activation_scale": "token", "smoothing": 0.5}
    chosen = recipe(smoothed, calibration={"text": text, "num_samples": 16, "sequence_length": 64})
    quantize.quantize_checkpoint(tmp_path / "source", tmp_path / "out", chosen, calibration_tools=TOOLS)
    norm = "model.layers.0.input_layernorm.weight"
    before, after = (quantize.open_checkpoint(tmp_path / name).load(norm) for name in ("source", "out"))
    assert not np.allclose(before, after, atol=1e-2), "factors go into the norm"
    ids = random_ids()
    expected = expected_logits(model, ids)
    # Eight bits on both sides of every product of a model of random weights.
    assert np.linalg.norm(logits(tmp_path / "out", ids) - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # what it says is what is wanted
@pytest.mark.parametrize("family", FAMILIES_WITH_TRAITS)
@pytest.mark.parametrize("linears", [INT4, {"scheme": "int8"}], ids=["int4", "int8"])
def test_transformers_loads_the_export_by_its_own_names(tmp_path: Path, family: str, linears: dict[str, Any]) -> None:
    model_type, settings = FAMILIES_WITH_TRAITS[family]
    save_with_tokenizer(tmp_path / "source", model_type, **settings)
    quantize.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe(linears))
    export_checkpoint(tmp_path / "out", tmp_path / "exported", ExportOptions("compressed-tensors", dtype="float32"))
    assert lint_checkpoint(tmp_path / "out", check_values=True) == []
    assert lint_checkpoint(tmp_path / "exported", check_values=True) == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).eval()
    ids = random_ids(2, 60)
    ours = logits(tmp_path / "out", ids)
    np.testing.assert_allclose(expected_logits(loaded, ids), ours, atol=1e-3)
    # And what was exported comes back with the same values.
    quantize.quantize_checkpoint(tmp_path / "exported", tmp_path / "back", recipe({"scheme": "none"}))
    np.testing.assert_allclose(logits(tmp_path / "back", ids), ours, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES_WITH_TRAITS)
@pytest.mark.parametrize("parallelism", [Parallelism(2, 2), Parallelism(4)], ids=str)
def test_ranks_compute_what_one_does(tmp_path: Path, family: str, parallelism: Parallelism) -> None:
    save_model(tmp_path, FAMILIES_WITH_TRAITS[family][0], **FAMILIES_WITH_TRAITS[family][1])
    ids = random_ids()
    expected = logits(tmp_path, ids)
    limits = EngineLimits(
        max_batch_size=4, max_num_tokens=512, max_seq_len=256, tokens_per_block=32, num_blocks=12, vocab_size=VOCAB_SIZE
    )
    np.testing.assert_allclose(run_mixed(RankedReference(tmp_path, parallelism, limits), ids), expected, atol=1e-4)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi3") / "source"
    save_with_tokenizer(path, PHI3[0], **PHI3[1])
    return path


def test_parts_of_a_fused_projection_are_rows_of_it(phi3: Path) -> None:
    stored, seen = load_file(phi3 / "model.safetensors"), quantize.open_checkpoint(phi3)
    assert not any("qkv_proj" in name or "gate_up" in name for name in seen.names())
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        parts = [seen.load(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
        assert [len(part) for part in parts] == [64, 32, 32] and not any(part.flags.writeable for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts), stored[f"{prefix}self_attn.qkv_proj.weight"])
        halves = [seen.load(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
        np.testing.assert_array_equal(np.concatenate(halves), stored[f"{prefix}mlp.gate_up_proj.weight"])
    info = seen.info("model.layers.0.self_attn.k_proj.weight")
    assert (info.shape, info.nbytes) == ((32, 64), 32 * 64 * 4)
    np.testing.assert_array_equal(
        seen.load_rows(info.name, 5, 9), stored["model.layers.0.self_attn.qkv_proj.weight"][69:73]
    )
    with pytest.raises(CheckpointError, match=r"has no tensor .*qkv_proj"):
        seen.info("model.layers.0.self_attn.qkv_proj.weight")


def test_a_fused_matrix_of_other_rows_is_refused(phi3: Path, tmp_path: Path) -> None:
    config = json.loads((phi3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    (tmp_path / "model.safetensors").write_bytes((phi3 / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight' has 128 rows, config.json says 192; get it again"):
        quantize.open_checkpoint(tmp_path)


STATIC_FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
SMOOTHED = {"scheme": "int8", "activations": "int8", "smoothing": 0.5}


@pytest.mark.parametrize(
    ("linears", "others", "consumer", "message"),
    [
        (
            INT4,
            {"overrides": [{"match": "*.k_proj.weight", "scheme": "int8"}]},
            "vllm",
            "q_proj.*but .*k_proj.* is int8",
        ),
        (INT4, {}, "sglang", "SGLang is not known to load quantized phi3 models; exports of them are for vLLM, tools"),
        (STATIC_FP8, {}, "vllm", "each of its parts has a scale; take a scale per channel"),
        ({"scheme": "fp8", "granularity": "block"}, {}, "vllm", "no multiples of 128, the size of a block"),
        (SMOOTHED, {"kv_cache": "fp8"}, "vllm", "scales of the KV cache are not exported for phi3"),
    ],
)
def test_parts_that_cannot_be_one_matrix_are_not_exported(
    phi3: Path, text: Path, tmp_path: Path, linears: Any, others: Any, consumer: Any, message: str
) -> None:
    quantize_calibrated(phi3, tmp_path / "out", text, linears, **others)
    with pytest.raises(ExportError, match=message) as refused:
        export_checkpoint(tmp_path / "out", tmp_path / "exported", ExportOptions("compressed-tensors", consumer))
    assert "\n" not in str(refused.value) and not (tmp_path / "exported").exists()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("linears", [INT4, {"scheme": "fp8"}, {"scheme": "nvfp4"}], ids=["int4", "fp8", "nvfp4"])
def test_parts_of_a_packed_matrix_are_kept_bit_for_bit(
    phi3: Path, text: Path, tmp_path: Path, linears: dict[str, Any], layout: Any
) -> None:
    if layout == "modelopt" and linears["scheme"] == "nvfp4":  # which has no name for weights alone
        linears = linears | {"activations": "nvfp4"}
    quantize_calibrated(phi3, tmp_path / "out", text, linears)
    consumer: Any = "modelopt" if layout == "modelopt" else "vllm"
    export_checkpoint(tmp_path / "out", tmp_path / "exported", ExportOptions(layout, consumer, dtype="float32"))
    quantize_calibrated(tmp_path / "exported", tmp_path / "again", text, linears)
    before, after = (quantize.open_checkpoint(tmp_path / name) for name in ("out", "again"))
    entries = after.config["quantization_config"]["tensors"]
    for name in before.names():
        if "_proj.weight" in name:
            assert before.load(name).tobytes() == after.load(name).tobytes(), name
    assert all(entry["kept"] for name, entry in entries.items() if "layers" in name)


@pytest.mark.parametrize(
    "linears", [SMOOTHED, {"scheme": "nvfp4", "activations": "nvfp4"}], ids=["int8 static", "nvfp4 static"]
)
def test_what_belongs_to_the_inputs_of_all_parts_is_exported_once(
    phi3: Path, text: Path, tmp_path: Path, linears: dict[str, Any]
) -> None:
    quantize_calibrated(phi3, tmp_path / "out", text, linears)
    export_checkpoint(tmp_path / "out", tmp_path / "exported", ExportOptions("compressed-tensors", dtype="float32"))
    assert lint_checkpoint(tmp_path / "exported", check_values=True) == []
    quantize.quantize_checkpoint(tmp_path / "exported", tmp_path / "back", recipe({"scheme": "none"}))
    for module in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.1.{module}.weight"
        before, after = (quantize.load_weight(quantize.open_checkpoint(tmp_path / p), name) for p in ("out", "back"))
        np.testing.assert_allclose(after.dequantize(), before.dequantize(), rtol=1e-6)


def test_the_language_model_is_read_out_of_one_that_sees_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text_config = {
        "model_type": "gemma3_text",
        **FAMILIES_WITH_TRAITS["gemma3"][1],
        "vocab_size": 96,
        "hidden_size": 64,
    }
    text_config |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text_config | {"max_position_embeddings": 256, "initializer_range": 0.2},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    ids = random_ids(2, 60)
    expected = expected_logits(whole, ids)
    found = logits(tmp_path / "whole", ids)
    assert expected.std() > 0.3 and np.abs(found - expected).max() < 1e-4
    assert "the language model is read, without the" in caplog.text
    quantize.quantize_checkpoint(tmp_path / "whole", tmp_path / "out", recipe({"scheme": "none"}))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    np.testing.assert_array_equal(logits(tmp_path / "out", ids), found)
