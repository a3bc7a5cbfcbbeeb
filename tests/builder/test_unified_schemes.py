"""TensorRT-LLM unified checkpoints of every scheme, read by the written rules: the ranks together are our checkpoint.

The rules: tensorrt_llm/quantization/layers.py and preprocess_weights of models/modeling_utils.py (1.2).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from safetensors.torch import load_file, save_file

import quantize
from plansmith_errors import ExportError
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.recipe import Recipe

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 64, 2
Rank = dict[str, torch.Tensor]

FP8 = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
INT4 = {"scheme": "int4", "group_size": 128, "symmetric": True}
INT8 = {"scheme": "int8", "activations": "int8", "smoothing": 0.5}
KEEP_UP_AND_GATE = [{"match": "*.1.mlp.[gu]*", "scheme": "none"}]
BASE_EXCLUDED = ["lm_head", "transformer.vocab_embedding", "transformer.ln_f"]
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"linears": FP8, "kv_cache": "fp8"},
    "fp8, shared scales": {"linears": {**FP8, "share_scale": True}},
    "fp8, some kept": {"linears": FP8, "overrides": KEEP_UP_AND_GATE},
    "fp8 rowwise, int8 cache": {"linears": {"scheme": "fp8"}, "kv_cache": "int8"},
    "int4": {"linears": INT4},
    "w4a8": {"linears": {**INT4, "activations": "fp8"}},
    "int8 static": {"linears": INT8},
    "int8 static, factors kept": {"linears": {**INT8, "fold_smoothing": False}, "kv_cache": "int8"},
    "int8 by token": {"linears": {**INT8, "activation_scale": "token"}},
    "nvfp4": {"linears": {"scheme": "nvfp4", "activations": "nvfp4"}, "kv_cache": "fp8"},
    "mixed": {"linears": FP8, "overrides": [{"match": "*.mlp.*", **INT4, "activations": None}]},
}
KEEPS_FACTORS = ("int4", "w4a8")
CASES = [
    (name, tp, pp)
    for name in [*SCHEMES, *(f"{name}, some factors" for name in KEEPS_FACTORS)]
    for tp, pp in [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2)]
    if (name, pp) != ("fp8, some kept", 2)  # refused: a test below
]
QUANTIZATION: dict[str, dict[str, Any]] = {  # of config.json, without exclude_modules
    "fp8": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "fp8, some kept": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
    "fp8 rowwise, int8 cache": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": "INT8"},
    "int4, some factors": {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "has_zero_point": False,
        "pre_quant_scale": True,
    },
    "w4a8": {
        "quant_algo": "W4A8_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "has_zero_point": False,
        "pre_quant_scale": True,
    },
    "int8 static": {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": None},
    "int8 by token": {"quant_algo": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "kv_cache_quant_algo": None},
    "nvfp4": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our own checkpoint of each scheme."""
    base = tmp_path_factory.mktemp("unified")
    sizes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": HEAD_DIM}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    save_with_tokenizer(base / "source", num_hidden_layers=LAYERS, initializer_range=0.05, **sizes, **heads)
    text = write_text(base / "words.txt")
    found = {name: quantized(base, name, text, recipe) for name, recipe in SCHEMES.items()}
    return found | {
        f"{name}, some factors": with_factors(found[name], base / f"{name} factors") for name in KEEPS_FACTORS
    }


def quantized(base: Path, name: str, text: Path, recipe: dict[str, Any]) -> Path:
    recipe = {"name": "test", "embeddings": {"scheme": "none"}, **recipe}
    data = Recipe.model_validate(recipe)
    if data.is_calibrated:
        settings = {"text": text, "num_samples": 2, "sequence_length": 64}
        data = Recipe.model_validate({**recipe, "calibration": settings})
    quantize.quantize_checkpoint(base / "source", base / name, data, calibration_tools=TOOLS)
    return base / name


def with_factors(source: Path, output: Path) -> Path:
    """As other tools leave AWQ's factors where no norm can take them: of o_proj and down_proj."""
    shutil.copytree(source, output)
    tensors = load_file(output / "model.safetensors")
    config = json.loads((output / "config.json").read_text())
    for name, entry in config["quantization_config"]["tensors"].items():
        if "o_proj" in name or "down_proj" in name:
            entry["pre_quant_scale"] = True
            tensors[name.replace("weight", "pre_quant_scale")] = torch.linspace(0.5, 2, 512)
    save_file(tensors, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(config))
    return output


def export(source: Path, output: Path, tp: int = 1, pp: int = 1) -> list[list[Rank]]:
    """The ranks of each stage."""
    export_checkpoint(source, output, ExportOptions("trtllm", tp_size=tp, pp_size=pp, dtype="float16"))
    assert lint_checkpoint(output, tp_size=tp, pp_size=pp, check_values=True) == []
    return [[load_file(output / f"rank{stage * tp + rank}.safetensors") for rank in range(tp)] for stage in range(pp)]


def floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float32).numpy()


def dequantize(rank: Rank, module: str) -> np.ndarray:
    """[out, in] of one rank, by what is stored beside the weight."""
    weight = rank[f"{module}.weight"]
    scales = rank.get(f"{module}.weights_scaling_factor", rank.get(f"{module}.per_channel_scale"))
    if scales is None:
        return floats(weight)
    if weight.dtype == torch.uint8:  # NVFP4: two columns in a byte
        codes = np.stack([weight.numpy() % 16, weight.numpy() // 16], axis=-1).reshape(len(weight), -1)
        blocks = np.repeat(floats(scales), 16, axis=1)
        return E2M1[codes] * blocks * floats(rank[f"{module}.weights_scaling_factor_2"])
    if scales.ndim == 2 and scales.shape[0] != 1:  # INT4: two rows in a byte
        raw = weight.view(torch.uint8).numpy().astype(np.int8)
        rows = np.stack([raw & 15, (raw >> 4) & 15], axis=1).reshape(2 * len(raw), -1)
        return np.where(rows > 7, rows - 16, rows) * np.repeat(floats(scales), 128, axis=1)
    return floats(weight) * floats(scales).reshape(-1, 1)  # of rows, or of the whole


def qkv(ranks: list[Rank], name: str) -> dict[str, np.ndarray]:
    """The three matrices again, of ranks that repeat key-value heads where there are fewer of them than ranks."""
    tp = len(ranks)
    kv_rows = max(KV_HEADS // tp, 1) * HEAD_DIM
    parts = [
        np.split(dequantize(rank, name), [HEADS // tp * HEAD_DIM, HEADS // tp * HEAD_DIM + kv_rows]) for rank in ranks
    ]
    first_copies = range(0, tp, max(tp // KV_HEADS, 1))
    return {
        "self_attn.q_proj": np.concatenate([part[0] for part in parts]),
        "self_attn.k_proj": np.concatenate([parts[rank][1] for rank in first_copies]),
        "self_attn.v_proj": np.concatenate([parts[rank][2] for rank in first_copies]),
    }


def layer_of(ranks: list[Rank], prefix: str) -> dict[str, np.ndarray]:
    def joined(name: str, axis: int) -> np.ndarray:
        return np.concatenate([dequantize(rank, prefix + name) for rank in ranks], axis=axis)

    return qkv(ranks, f"{prefix}attention.qkv") | {
        "self_attn.o_proj": joined("attention.dense", 1),
        "mlp.gate_proj": joined("mlp.fc", 0),
        "mlp.up_proj": joined("mlp.gate", 0),
        "mlp.down_proj": joined("mlp.proj", 1),
    }


def stage_of(layer: int, pp: int) -> tuple[int, int]:
    return (layer, 0) if pp == 2 else (0, layer)


def fp8_scale(weights: dict[str, quantize.QuantizedTensor], module: str) -> float:
    """What the matrices that the builder may join have in common: the largest of their scales."""
    joined = next(
        (names for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if module[-6:] in str(names)), ()
    )
    return max(float(w.scales) for name, w in weights.items() if name == module or name.rpartition(".")[2] in joined)


def assert_same_values(found: dict[str, np.ndarray], source: quantize.Checkpoint, layer: int) -> None:
    weights = {name: quantize.load_weight(source, f"model.layers.{layer}.{name}.weight") for name in found}
    for name, values in found.items():
        expected = weights[name].dequantize()
        if weights[name].scheme == "none":
            np.testing.assert_array_equal(values, expected.astype(np.float16), err_msg=name)
        elif weights[name].scheme == "fp8" and weights[name].scales is not None and weights[name].scales.ndim == 0:
            scale = fp8_scale(weights, name)
            if float(weights[name].scales) != scale:  # rounded again: three bits of mantissa, subnormals of 2^-9
                limit = np.maximum(np.abs(expected) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)
                assert (np.abs(values - expected) <= limit).all(), name
                continue
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=0, err_msg=name)
        else:
            np.testing.assert_allclose(values, expected, rtol=2e-6, atol=0, err_msg=name)


@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_ranks_put_together_are_our_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, tp: int, pp: int
) -> None:
    stages = export(checkpoints[name], tmp_path / "out", tp, pp)
    source = quantize.open_checkpoint(checkpoints[name])
    for layer in range(LAYERS):
        stage, local = stage_of(layer, pp)
        assert_same_values(layer_of(stages[stage], f"transformer.layers.{local}."), source, layer)


@pytest.mark.parametrize("name", QUANTIZATION)
def test_config_says_exactly_what_the_loader_takes(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    export(checkpoints[name], tmp_path / "out")
    kept = ["transformer.layers.1.mlp.fc", "transformer.layers.1.mlp.gate"] if name == "fp8, some kept" else []
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert found == {**QUANTIZATION[name], "exclude_modules": [*BASE_EXCLUDED, *kept]}
    assert not (tmp_path / "out" / "quant_cfg.json").exists()


@pytest.mark.parametrize("smoothing", [{}, {"smoothing": 0.5}])
def test_shared_scales_leave_no_value_to_round_again(
    checkpoints: dict[str, Path], tmp_path: Path, smoothing: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    base = checkpoints["fp8"].parent
    path = quantized(base, tmp_path.name, base / "words.txt", {"linears": {**FP8, "share_scale": True, **smoothing}})
    ours = quantize.open_checkpoint(path)
    for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        weights = [quantize.load_weight(ours, f"model.layers.0.{name}_proj.weight") for name in names]
        assert len({float(weight.scales) for weight in weights}) == 1  # type: ignore[arg-type]
        largest = max(np.abs(weight.dequantize()).max() for weight in weights)
        assert largest == pytest.approx(448 * float(weights[0].scales), rel=1e-6)  # type: ignore[arg-type]
    assert float(ours.load("model.layers.0.mlp.down_proj.weight_scale")) != float(weights[0].scales)  # type: ignore[arg-type]
    ((rank,),) = export(path, tmp_path / "out")
    assert "rounded again" not in caplog.text
    for module, name in (("mlp.fc", "mlp.gate_proj"), ("mlp.gate", "mlp.up_proj")):
        stored = quantize.load_weight(ours, f"model.layers.0.{name}.weight").values
        np.testing.assert_array_equal(
            rank[f"transformer.layers.0.{module}.weight"].view(torch.uint8), stored.view(np.uint8)
        )


def test_values_that_are_rounded_again_are_told(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export(checkpoints["fp8"], tmp_path / "out", tp=2)
    (message,) = [record.message for record in caplog.records if "rounded again" in record.message]
    assert message.startswith("6 FP8 matrices") and "share_scale true" in message  # two of q, k, v; one of gate, up


def test_a_mix_says_what_every_module_is(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    stages = export(checkpoints["mixed"], tmp_path / "out", pp=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    layers = json.loads((tmp_path / "out" / "quant_cfg.json").read_text())
    int4 = {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": False}
    prefix = "transformer.layers.0."  # both stages count from 0
    attention = {f"{prefix}attention.{name}": {"quant_algo": "FP8"} for name in ("qkv", "dense")}
    mlp = {f"{prefix}mlp.{name}": int4 for name in ("fc", "gate", "proj")}
    assert layers == {**config["quantization"], "quantized_layers": {**attention, **mlp}}
    assert stages[1][0][f"{prefix}mlp.fc.weight"].dtype == torch.int8


def test_what_belongs_to_the_inputs_is_on_every_rank(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = quantize.open_checkpoint(checkpoints["w4a8, some factors"])
    (ranks,) = export(checkpoints["w4a8, some factors"], tmp_path / "out", tp=2)
    for module, members in (("attention.qkv", "qkv"), ("mlp.proj", ["down"])):
        block = "mlp" if module == "mlp.proj" else "self_attn"
        weights = [quantize.load_weight(source, f"model.layers.1.{block}.{name}_proj.weight") for name in members]
        largest = max(np.abs(weight.dequantize()).max() for weight in weights)
        prefix = f"transformer.layers.1.{module}"
        for rank in ranks:
            assert floats(rank[f"{prefix}.activation_scaling_factor"]) == [weights[0].input_scale]
            # The kernels multiply INT4 weights that this scale, of the whole matrix, puts into e4m3.
            second = floats(rank[f"{prefix}.weights_scaling_factor_2"])
            np.testing.assert_allclose(second, [largest / 448], rtol=1e-6)
    factors = [rank["transformer.layers.1.mlp.proj.prequant_scaling_factor"] for rank in ranks]
    np.testing.assert_allclose(floats(torch.cat(factors)), np.linspace(0.5, 2, 512), rtol=1e-3)
    for rank in ranks:
        assert floats(rank["transformer.layers.1.mlp.fc.prequant_scaling_factor"]).tolist() == [1] * 512
        assert rank["transformer.layers.1.mlp.fc.prequant_scaling_factor"].dtype == torch.float16


@pytest.mark.parametrize(("name", "largest"), [("fp8", 448.0), ("int8 static, factors kept", 127.0)])
def test_keys_and_values_have_one_scale(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, largest: float
) -> None:
    source = quantize.open_checkpoint(checkpoints[name])
    (ranks,) = export(checkpoints[name], tmp_path / "out", tp=2)
    own = [source.load_float32(f"model.layers.0.self_attn.{kind}_proj.{kind}_scale") for kind in "kv"]
    expected = max(1.0, *own) if largest == 448.0 else max(own)  # FP8: the run-time's kernels never shrink
    for rank in ranks:
        assert rank["transformer.layers.0.attention.kv_cache_scaling_factor"].tolist() == [pytest.approx(expected)]


def test_int8_by_token_brings_what_its_plugins_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (ranks,) = export(checkpoints["int8 by token"], tmp_path / "out", tp=2)
    prefix = "transformer.layers.0."
    for rank in ranks:
        assert rank[f"{prefix}attention.qkv.per_channel_scale"].shape == (1, (HEADS + 2 * KV_HEADS) * HEAD_DIM // 2)
        assert floats(rank[f"{prefix}attention.dense.smoother"]).tolist() == [[1.0] * 256]
        assert [rank[f"{prefix}{norm}.scale_to_int"].tolist() for norm in ("input_layernorm", "post_layernorm")] == [
            [1]
        ] * 2
        assert f"{prefix}mlp.fc.smoother" not in rank and f"{prefix}mlp.fc.act_scale" not in rank


@pytest.mark.parametrize(
    ("name", "module", "suffix"),
    [
        ("fp8", "mlp.proj", "activation_scaling_factor"),
        ("fp8", "attention", "kv_cache_scaling_factor"),
        ("w4a8", "mlp.gate", "weights_scaling_factor_2"),
        ("int8 static", "attention.dense", "prequant_scaling_factor"),
        ("int8 by token", "attention.dense", "smoother"),
        ("nvfp4", "mlp.fc", "weights_scaling_factor"),
        ("mixed", "attention.qkv", "weights_scaling_factor"),
    ],
)
def test_the_linter_misses_no_scale(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, module: str, suffix: str
) -> None:
    export(checkpoints[name], tmp_path / "out", tp=2)
    file = tmp_path / "out" / "rank1.safetensors"
    whole, damaged = load_file(file), f"transformer.layers.1.{module}.{suffix}"

    def lint(tensor: torch.Tensor | None) -> list[str]:
        kept = {key: value for key, value in whole.items() if key != damaged}
        save_file(kept if tensor is None else {**kept, damaged: tensor}, file)
        return [str(finding) for finding in lint_checkpoint(tmp_path / "out", check_values=True)]

    (dropped,) = lint(None)
    assert dropped.startswith(f"missing: rank1: {damaged}: expected ")
    (zeroed,) = lint(torch.zeros_like(whole[damaged]))
    assert "scales are zero or negative" in zeroed and damaged in zeroed
    if whole[damaged].numel() == 1:
        (other,) = lint(whole[damaged] * 3)
        assert other.startswith(f"scale: rank1: {damaged}: is ") and other.endswith("ranks of one stage have the same")


def test_layers_that_a_stage_counts_alike_must_be_alike(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"layers 0 and 1 of the model are both layer 0 .* take --pp 1"):
        export(checkpoints["fp8, some kept"], tmp_path / "out", pp=2)
    assert not (tmp_path / "out").exists()


def test_scales_that_were_never_calibrated_are_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoints["fp8"], tmp_path / "q"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.input_scale"].zero_()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ExportError, match=r"static scales of model\.layers\.1\.mlp\.up_proj are no positive numbers"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("linears", "message"),
    [
        ({"scheme": "fp8", "granularity": "tensor"}, "take the recipe fp8-static"),
        ({"scheme": "fp8", "granularity": "block"}, "no kernels for it"),
        ({"scheme": "nvfp4"}, "take the recipe nvfp4-w4a4"),
        ({"scheme": "mxfp4"}, "no kernels for it"),
        ({**INT4, "group_size": 64, "activations": "fp8"}, "W4A8 kernels take groups of 128, found 64"),
        ({**INT8, "activation_scale": "token", "fold_smoothing": False}, "no factors of the inputs"),
        ({**FP8, "smoothing": 0.5, "fold_smoothing": False}, "FP8 has no factors of the inputs"),
    ],
)
def test_what_has_no_form_there_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, linears: dict[str, Any], message: str
) -> None:
    base = checkpoints["fp8"].parent
    path = quantized(base, f"refused-{tmp_path.name}", base / "words.txt", {"linears": linears})
    with pytest.raises(ExportError) as error:
        export(path, tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_nvfp4_sizes_that_the_interleaved_scales_do_not_have(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"NVFP4 at tp 8 needs a multiple of 1024; legal tp: 1, 2, 4; pp up to 2"):
        export(checkpoints["nvfp4"], tmp_path / "out", tp=8)
