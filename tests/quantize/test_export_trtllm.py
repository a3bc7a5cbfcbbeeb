"""A quantized model becomes a TensorRT-LLM unified checkpoint: its ranks put together again are the source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_models import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    config,
    dequantized,
    load,
    rows_from_nibbles,
    scaled,
    weights,
    write_model,
    write_quantized,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plansmith_errors import ExportError, PlansmithError
from quantize.export import ExportOptions, export_checkpoint


def export(source: Path, tp: int = 1, pp: int = 1, **options: Any) -> Path:
    output = source.parent / f"{source.name}-trtllm-{tp}-{pp}"
    export_checkpoint(source, output, ExportOptions("trtllm", tp_size=tp, pp_size=pp, **options))
    return output


def dequantize(rank: dict[str, np.ndarray], name: str) -> np.ndarray:
    weight = rank[f"{name}.weight"]
    if f"{name}.weights_scaling_factor" in rank:
        return scaled(rows_from_nibbles(weight), rank[f"{name}.weights_scaling_factor"])
    if f"{name}.per_channel_scale" in rank:
        return weight * rank[f"{name}.per_channel_scale"][:, None]
    return weight


class Whole:
    """The ranks of one export, read as the run-time does: rank = pp_rank * tp + tp_rank, layers count per stage."""

    def __init__(self, path: Path, tp: int, pp: int) -> None:
        self.tp = tp
        self.stages = [
            [load(path / f"rank{stage * tp + index}.safetensors") for index in range(tp)] for stage in range(pp)
        ]

    def stage_of(self, layer: int) -> tuple[list[dict[str, np.ndarray]], int]:
        for ranks in self.stages:
            count = 1 + max(int(name.split(".")[2]) for name in ranks[0] if ".layers." in name)
            if layer < count:
                return ranks, layer
            layer -= count
        raise AssertionError("too few layers")

    def linear(self, layer: int, name: str) -> list[np.ndarray]:
        ranks, local = self.stage_of(layer)
        return [dequantize(rank, f"transformer.layers.{local}.{name}") for rank in ranks]

    def qkv(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q_rows = HEADS // self.tp * HEAD_DIM
        kv_rows = max(KV_HEADS // self.tp, 1) * HEAD_DIM
        parts = [np.split(part, [q_rows, q_rows + kv_rows]) for part in self.linear(layer, "attention.qkv")]
        copies = max(self.tp // KV_HEADS, 1)
        for rank, part in enumerate(parts):  # repeated heads really are the same
            np.testing.assert_array_equal(part[1], parts[rank // copies * copies][1])
        q, k, v = (np.concatenate([part[index] for part in parts]) for index in range(3))
        unique = [head for head in range(len(k) // HEAD_DIM) if head % copies == 0]
        rows = np.concatenate([np.arange(head * HEAD_DIM, (head + 1) * HEAD_DIM) for head in unique])
        return q, k[rows], v[rows]


@pytest.mark.parametrize(
    ("recipe", "tp", "pp"),
    [("int4", 1, 1), ("int4", 2, 2), ("int4", 4, 1), ("int4-128", 1, 3), ("fp8", 8, 1), ("fp8", 2, 2), ("none", 4, 3)],
)
def test_ranks_put_together_are_the_source(tmp_path: Path, recipe: str, tp: int, pp: int) -> None:
    source = write_quantized(tmp_path / "q", recipe)
    output = export(source, tp, pp)
    assert len(list(output.glob("rank*.safetensors"))) == tp * pp
    whole = Whole(output, tp, pp)
    for layer in range(LAYERS):
        found = dict(zip(("q", "k", "v"), whole.qkv(layer), strict=True))
        found["gate"] = np.concatenate(whole.linear(layer, "mlp.fc"))
        found["up"] = np.concatenate(whole.linear(layer, "mlp.gate"))
        found["o"] = np.concatenate(whole.linear(layer, "attention.dense"), axis=1)
        found["down"] = np.concatenate(whole.linear(layer, "mlp.proj"), axis=1)
        for name, values in found.items():
            block = "mlp" if name in ("gate", "up", "down") else "self_attn"
            expected = dequantized(source, f"model.layers.{layer}.{block}.{name}_proj.weight")
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=0)
        ranks, local = whole.stage_of(layer)
        norm = weights()[f"model.layers.{layer}.post_attention_layernorm.weight"]
        for rank in ranks:
            np.testing.assert_array_equal(rank[f"transformer.layers.{local}.post_layernorm.weight"], norm)


def test_ends_of_the_pipeline(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "fp8")
    whole = Whole(export(source, 2, 2), 2, 2)
    for rank in whole.stages[0]:
        np.testing.assert_array_equal(
            rank["transformer.vocab_embedding.weight"], weights()["model.embed_tokens.weight"]
        )
        assert not {"lm_head.weight", "transformer.ln_f.weight"} & set(rank)
    for rank in whole.stages[1]:
        assert "transformer.vocab_embedding.weight" not in rank and "transformer.ln_f.weight" in rank
    head = np.concatenate([rank["lm_head.weight"] for rank in whole.stages[1]])
    assert head.shape == (VOCAB + 1, HIDDEN) and not head[VOCAB:].any(), "the vocabulary is padded to the ranks"
    np.testing.assert_array_equal(head[:VOCAB], weights()["lm_head.weight"])


def test_tied_embeddings_are_written_twice_and_dequantized(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4", tie_word_embeddings=True)
    rank = load(export(source) / "rank0.safetensors")
    expected = dequantized(source, "model.embed_tokens.weight").astype(np.float16)
    np.testing.assert_array_equal(rank["transformer.vocab_embedding.weight"], expected)
    np.testing.assert_array_equal(rank["lm_head.weight"], expected)


def test_biases_of_qwen2_follow_their_rows(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "int4", model_type="qwen2")
    output = export(source, 4)
    found = json.loads((output / "config.json").read_text())
    assert found["architecture"] == "QWenForCausalLM" and found["qwen_type"] == "qwen2" and found["attn_bias"]
    original = {module: weights("qwen2")[f"model.layers.1.self_attn.{module}_proj.bias"] for module in "qkv"}
    for tp_rank in range(4):
        bias = load(output / f"rank{tp_rank}.safetensors")["transformer.layers.1.attention.qkv.bias"]
        q, k, v = np.split(bias, [HEADS // 4 * HEAD_DIM, HEADS // 4 * HEAD_DIM + HEAD_DIM])
        head = tp_rank // 2
        np.testing.assert_array_equal(q, original["q"].reshape(4, -1)[tp_rank])
        np.testing.assert_array_equal(k, original["k"].reshape(KV_HEADS, -1)[head])
        np.testing.assert_array_equal(v, original["v"].reshape(KV_HEADS, -1)[head])


def test_config_says_what_the_loader_reads(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    source = write_quantized(tmp_path / "q", "int4", rope_parameters=llama3, rope_theta=None)
    found = json.loads((export(source, 2, 2) / "config.json").read_text())
    assert found["mapping"] == {
        "world_size": 4,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": 2,
        "pp_size": 2,
        "moe_tp_size": 2,
        "moe_ep_size": 1,
    }
    assert found["rotary_base"] == 500000.0, "wherever the config keeps it"
    assert found["rotary_scaling"]["type"] == "llama3" and found["rotary_scaling"]["factor"] == 8.0
    quantization = found["quantization"]
    assert (quantization["quant_algo"], quantization["group_size"]) == ("W4A16_AWQ", 64)
    assert quantization["pre_quant_scale"] is False and quantization["exclude_modules"]
    assert (found["vocab_size"], found["head_size"], found["intermediate_size"]) == (VOCAB, HEAD_DIM, FFN)
    assert found["dtype"] == "float16" and found["position_embedding_type"] == "rope_gpt_neox"


def test_mistral_and_side_files(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "fp8", model_type="mistral", sliding_window=None)
    output = export(source, dtype="bfloat16")
    found = json.loads((output / "config.json").read_text())
    assert (found["architecture"], found["dtype"]) == ("MistralForCausalLM", "bfloat16")
    assert found["quantization"]["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert "transformer.ln_f" in found["quantization"]["exclude_modules"]
    assert (output / "LICENSE").read_text() == "MIT" and (output / "tokenizer.json").exists()
    card = (output / "README.md").read_text()
    assert "fp8" in card and "Relative error" in card and "TensorRT-LLM 1.2" in card


@pytest.mark.parametrize(
    ("recipe", "tp", "pp", "model", "expected"),
    [
        ("int8", 1, 1, {}, "take the recipe fp8 or int4-rtn-sym"),
        ("int4-asym", 1, 1, {}, "without zero points"),
        ("int4-32", 1, 1, {}, "in groups of 64 or 128, found 32"),
        ("int4", 8, 1, {}, "legal (tp, group) pairs: (1, 64), (1, 128), (2, 64), (4, 64)"),
        ("fp8", 3, 1, {}, "8 attention heads do not divide over tp 3; legal tp: 1, 2, 4, 8"),
        ("fp8", 1, 4, {}, "3 layers cannot fill 4 pipeline stages"),
        ("fp8", 0, 1, {}, "tp is 0, expected 1 or more"),
        ("fp8", 1, 1, {"model_type": "qwen2"}, "without attention biases"),
        ("fp8", 1, 1, {"model_type": "mistral", "sliding_window": 64}, "attention slides over 64 tokens of 128"),
        ("fp8", 1, 1, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ("fp8", 1, 1, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_would_not_load_is_refused_before_any_work(
    tmp_path: Path, recipe: str, tp: int, pp: int, model: dict[str, Any], expected: str
) -> None:
    source = write_quantized(tmp_path / "q", recipe, **model)
    output = tmp_path / "out"
    with pytest.raises(ExportError) as error:
        export_checkpoint(source, output, ExportOptions("trtllm", tp_size=tp, pp_size=pp))
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert not output.exists()


def test_mixed_linears_are_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "q", "fp8", [{"match": "*.1.mlp.down_proj.weight", "scheme": "none"}])
    with pytest.raises(ExportError, match=r"model\.layers\.1\.mlp\.down_proj .* one scheme for all linears"):
        export(source)


JUNK = st.sampled_from([None, "", "text", -1, 0, 1.5, True, [], [1], {}, {"a": 1}, 10**30, float("inf")])


@settings(max_examples=30, deadline=None)
@given(key=st.sampled_from([*config("mistral"), "rope_scaling", "sliding_window", "dtype", "hidden_act"]), junk=JUNK)
def test_junk_in_a_config_is_refused_or_harmless(whole_model: Path, key: str, junk: Any) -> None:
    changed = {**config("mistral", sliding_window=None), key: junk}
    (whole_model / "config.json").write_text(json.dumps(changed))
    output = whole_model.parent / "out"
    shutil.rmtree(output, ignore_errors=True)
    try:
        export_checkpoint(whole_model, output, ExportOptions("trtllm"))
    except PlansmithError as error:
        assert "\n" not in str(error) and not output.exists()


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "mistral", "mistral", sliding_window=None)
