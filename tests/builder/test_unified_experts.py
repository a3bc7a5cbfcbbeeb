"""Models with experts, and those that normalize queries and keys, as TensorRT-LLM unified checkpoints.

The rules: tensorrt_llm/layers/moe.py and models/qwen/model.py (1.2).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from safetensors.torch import load_file

import quantize
from plansmith_errors import ExportError
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.mixture import Mixture
from quantize.recipe import Recipe

EXPERTS, HIDDEN, FFN, TP = 4, 256, 256, 2
SIZES = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": FFN,
        "norm_topk_prob": True,
        "head_dim": 64,
    },
}
FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {"linears": {"scheme": "none"}},
    "int4": {"linears": {"scheme": "int4", "group_size": 128, "symmetric": True}},
    "fp8": {"linears": FP8, "kv_cache": "fp8", "overrides": [{"match": "*.1.self_attn.*", "scheme": "none"}]},
}
Rank = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    for family, settings in MODELS.items():
        save_with_tokenizer(base / family, family, **SIZES, **settings)
    return {family: base / family for family in MODELS}


def quantized(source: Path, output: Path, recipe: dict[str, Any]) -> quantize.Checkpoint:
    recipe = {"name": "test", "embeddings": {"scheme": "none"}, **recipe}
    data = Recipe.model_validate(recipe)
    if data.is_calibrated:
        text = write_text(output.parent / "words.txt")
        settings = {"text": text, "num_samples": 4, "sequence_length": 64}
        data = Recipe.model_validate({**recipe, "calibration": settings})
    quantize.quantize_checkpoint(source, output, data, calibration_tools=TOOLS)
    return quantize.open_checkpoint(output)


def export(source: Path, output: Path, tp: int = TP, pp: int = 1) -> list[Rank]:
    export_checkpoint(source, output, ExportOptions("trtllm", tp_size=tp, pp_size=pp, dtype="float16"))
    assert lint_checkpoint(output, tp_size=tp, pp_size=pp, check_values=True) == []
    return [load_file(output / f"rank{rank}.safetensors") for rank in range(tp * pp)]


def stacked(rank: Rank, module: str) -> np.ndarray:
    """[experts, out, in] of one rank."""
    weight, scales = rank[f"{module}.weight"], rank.get(f"{module}.weights_scaling_factor")
    if scales is None:
        return weight.to(torch.float32).numpy()
    if weight.dtype == torch.int8:
        raw = weight.view(torch.uint8).numpy().astype(np.int8)
        rows = np.stack([raw & 15, (raw >> 4) & 15], axis=2).reshape(len(raw), -1, raw.shape[2])
        return np.where(rows > 7, rows - 16, rows) * np.repeat(scales.numpy(), 128, axis=2)
    assert scales.shape == (EXPERTS, 1)
    return weight.to(torch.float32).numpy() * scales.numpy()[:, :, None]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_experts_put_together_are_our_checkpoint(
    sources: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    ours = quantized(sources[family], tmp_path / "q", RECIPES[name])
    ranks = export(tmp_path / "q", tmp_path / "out")
    mixture = Mixture.from_config(ours.config, "config.json")
    assert mixture is not None
    for layer in range(2):
        prefix = f"transformer.layers.{layer}.mlp."
        # Up above gate on every rank; what its inputs go through is the same for all experts.
        halves = [np.split(stacked(rank, f"{prefix}fc"), 2, axis=1) for rank in ranks]
        up, gate = (np.concatenate([half[index] for half in halves], axis=1) for index in range(2))
        down = np.concatenate([stacked(rank, f"{prefix}proj") for rank in ranks], axis=2)
        router = ours.load_float32(f"model.layers.{layer}.{mixture.router}.weight")
        for rank in ranks:
            assert rank[f"{prefix}router.weight"].dtype == torch.float32
            np.testing.assert_array_equal(rank[f"{prefix}router.weight"], router)
        for index, expert in enumerate(mixture.experts):
            for values, module in ((gate, expert.gate), (up, expert.up), (down, expert.down)):
                weight = quantize.load_weight(ours, f"model.layers.{layer}.{module}.weight")
                expected = weight.dequantize()
                # Of FP8, gate and up have one scale: that with the smaller one is rounded again.
                rounding = {"none": 2.0**-11, "fp8": 2.0**-4}.get(name, 2e-6) if module != expert.down else 2.0**-11
                limit = rounding * np.abs(expected) + 2.0**-14 * (name != "int4")
                assert (np.abs(values[index] - expected) <= limit).all(), module
        if name == "fp8":
            scales = [
                quantize.load_weight(ours, f"model.layers.{layer}.{expert.down}.weight").input_scale
                for expert in mixture.experts
            ]
            assert ranks[1][f"{prefix}proj.activation_scaling_factor"].numpy() == [max(map(float, scales))]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", MODELS)
def test_config_of_experts(sources: dict[str, Path], tmp_path: Path, family: str) -> None:
    quantized(sources[family], tmp_path / "q", RECIPES["fp8"])
    export(tmp_path / "q", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    top_k = MODELS[family]["num_experts_per_tok"]
    assert config["moe"] == {"num_experts": EXPERTS, "top_k": top_k, "normalization_mode": 1}
    assert (config["hidden_act"], config["mapping"]["moe_tp_size"]) == ("swiglu", TP)
    kept = [f"transformer.layers.1.attention.{name}" for name in ("qkv", "dense")]
    base = ["lm_head", "transformer.vocab_embedding", "transformer.ln_f"]
    assert config["quantization"]["exclude_modules"] == [*base, *kept, "*router"]
    if family == "qwen3_moe":
        assert (config["architecture"], config["qwen_type"]) == ("Qwen3MoeForCausalLM", "qwen3_moe")
        assert config["moe_intermediate_size"] == FFN and config["qk_layernorm"] is True


def test_experts_that_stay_as_they_are_are_excluded_as_a_whole(sources: dict[str, Path], tmp_path: Path) -> None:
    rule = {"linears": FP8, "overrides": [{"match": "*.0.block_sparse_moe.*", "scheme": "none"}]}
    quantized(sources["mixtral"], tmp_path / "q", rule)
    (rank,) = export(tmp_path / "q", tmp_path / "out", tp=1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["exclude_modules"][-2:] == ["transformer.layers.0.mlp", "*router"]
    assert rank["transformer.layers.0.mlp.fc.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("family", "recipe", "model", "message"),
    [
        ("mixtral", {"linears": {"scheme": "fp8"}}, {}, "of models with experts it takes FP8 and W4A16_AWQ"),
        ("qwen3_moe", RECIPES["int4"], {"mlp_only_layers": [0]}, "experts in every layer; layer 0 has none"),
        ("qwen3_moe", RECIPES["none"], {"attention_bias": True}, "without a bias of the attention's output"),
        ("mixtral", RECIPES["none"], {"sliding_window": 64}, "attention slides over 64 tokens"),
        (
            "mixtral",
            {**RECIPES["int4"], "overrides": [{"match": "*.experts.2.w2.weight", "scheme": "none"}]},
            {},
            "stores them as one tensor; give both the same rule",
        ),
        (
            "mixtral",
            {**RECIPES["int4"], "overrides": [{"match": "*.w2.weight", "scheme": "none"}]},
            {},
            "all linears of the experts of a layer or none",
        ),
        (
            "mixtral",
            {"linears": FP8, "overrides": [{"match": "*.experts.*", "scheme": "int4", "activations": None}]},
            {},
            "models with experts have one scheme",
        ),
    ],
)
def test_what_is_not_built_with_experts_is_refused(
    tmp_path: Path, family: str, recipe: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    save_with_tokenizer(tmp_path / "model", family, **SIZES, **MODELS[family], **model)
    quantized(tmp_path / "model", tmp_path / "q", recipe)
    with pytest.raises(ExportError) as error:
        export(tmp_path / "q", tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_qwen3_brings_its_norms_of_queries_and_keys(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model", "qwen3", head_dim=64, **SIZES)
    quantized(tmp_path / "model", tmp_path / "q", {"linears": FP8, "kv_cache": "int8"})
    (first, second) = export(tmp_path / "q", tmp_path / "out", tp=1, pp=2)
    source = quantize.open_checkpoint(tmp_path / "q")
    for rank, layer in ((first, 0), (second, 1)):
        for ours, theirs in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
            expected = source.load_float32(f"model.layers.{layer}.self_attn.{ours}.weight").astype(np.float16)
            np.testing.assert_array_equal(rank[f"transformer.layers.0.attention.{theirs}.weight"], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architecture"], config["qwen_type"], config["attn_bias"]) == ("Qwen3ForCausalLM", "qwen3", False)
    quantized(tmp_path / "model", tmp_path / "rowwise", {"linears": {"scheme": "fp8"}})
    with pytest.raises(ExportError, match="does not normalize queries and keys; take the recipe fp8-static"):
        export(tmp_path / "rowwise", tmp_path / "refused")
