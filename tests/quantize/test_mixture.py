"""Models with experts: what their tensors are, what is quantized of them, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_mixtures import EXPERTS, mixture_config, mixture_weights, write_mixture

import quantize
from plansmith_errors import CheckpointError, ExportError, QuantizeError
from quantize.architectures import fused_set, role_of
from quantize.calibration.estimate import LayerShape, estimate_cost
from quantize.calibration.experts import ExpertGram
from quantize.calibration.gram import Gram
from quantize.calibration.products import Products
from quantize.checkpoint import TensorInfo
from quantize.export import ExportOptions, export_checkpoint
from quantize.lint import lint_checkpoint
from quantize.mixture import Mixture
from quantize.plan import plan_tensors
from quantize.recipe import Recipe
from quantize.safetensors_checkpoint import SafetensorsCheckpoint

POOL = ThreadPoolExecutor(2)
PRODUCTS = Products(POOL)

FAMILIES = ("mixtral", "qwen3_moe")
NAMES = {  # of the last layer: router, and gate, up and down of expert 1
    "mixtral": ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.1.{name}" for name in ("w1", "w3", "w2"))),
    "qwen3_moe": ("mlp.gate", *(f"mlp.experts.1.{name}_proj" for name in ("gate", "up", "down"))),
}


def names_of(family: str) -> list[str]:
    return [f"model.layers.1.{module}.weight" for module in NAMES[family]]


def recipe(overrides: Any = (), **linears: Any) -> Recipe:
    return Recipe.model_validate({"name": "t", "linears": linears, "overrides": overrides})


INT4 = {"scheme": "int4", "group_size": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_kept_and_every_expert_is_quantized(tmp_path: Path, family: str) -> None:
    source = write_mixture(tmp_path / "s", family)
    router, gate, up, down = names_of(family)
    everything = [{"match": "*", "scheme": "int8"}, {"match": router, "scheme": "none"}]
    for number, chosen in enumerate((recipe(**INT4), recipe(everything, **INT4))):
        output = tmp_path / f"q{number}"
        quantize.quantize_checkpoint(source, output, chosen)
        quantized = quantize.open_checkpoint(output)
        entries = quantized.config["quantization_config"]["tensors"]
        assert entries[router]["scheme"] == "none"
        np.testing.assert_array_equal(quantized.load(router), mixture_weights(family)[router])
        assert {entries[name]["scheme"] for name in (gate, up, down)} == {"int4" if number == 0 else "int8"}
        error = quantize.load_weight(quantized, down).dequantize() - mixture_weights(family)[down]
        assert np.linalg.norm(error) < 0.12 * np.linalg.norm(mixture_weights(family)[down])
        assert lint_checkpoint(output) == []
    with pytest.raises(QuantizeError, match=r"matches no matrix that is quantized"):
        quantize.quantize_checkpoint(source, tmp_path / "x", recipe([{"match": router, "scheme": "fp8"}], **INT4))


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_and_up_of_an_expert_share_nvfp4s_scale_and_experts_do_not(tmp_path: Path, family: str) -> None:
    source = write_mixture(tmp_path / "s", family)
    quantize.quantize_checkpoint(source, tmp_path / "q", recipe(scheme="nvfp4"))
    checkpoint, weights = quantize.open_checkpoint(tmp_path / "q"), mixture_weights(family)
    _, gate, up, down = names_of(family)
    scales = {name: float(checkpoint.load(f"{name}_scale_2")) for name in (gate, up, down)}
    largest = max(np.abs(weights[gate]).max(), np.abs(weights[up]).max())
    assert scales[gate] == scales[up] == pytest.approx(largest / 2688)
    assert scales[down] == pytest.approx(np.abs(weights[down]).max() / 2688)
    other = gate.replace("experts.1.", "experts.3.")
    assert float(checkpoint.load(f"{other}_scale_2")) > scales[gate]
    assert fused_set(down) == (down,) and fused_set(up) == (gate, up)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": 5}, r"experts\.4\.gate_proj\.weight' is missing \(3 of them"),
        ({"num_experts": 3}, r"experts\.3\.\w+\.weight' \(3 such\) belongs to no qwen3_moe model"),
        ({"mlp_only_layers": []}, r"layers\.0\.mlp\.gate\.weight' is missing \(13 of them"),
        ({"mlp_only_layers": [0, 1]}, r"layers\.1\.mlp\.\S+' \(13 such\) belongs to no"),
        ({"decoder_sparse_step": 3}, "belongs to no qwen3_moe model"),
        ({"num_experts": 0}, "num_experts is 0, expected a positive integer"),
        ({"num_experts": 10**9}, "taken for a damaged config"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most num_experts, which is 4"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is '0', expected a list"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ({"model_type": "qwen3"}, r"belongs to no qwen3 model"),
    ],
)
def test_a_config_that_fits_the_tensors_badly_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    source = write_mixture(tmp_path / "s", **config)
    with pytest.raises(CheckpointError, match=message) as refused:
        if "norm_topk_prob" in config or "moe_intermediate_size" in config or "mlp_only_layers" in config:
            Mixture.from_config(mixture_config(**config), "config.json")
        quantize.quantize_checkpoint(source, tmp_path / "q", recipe(**INT4))
    assert "\n" not in str(refused.value) and not (tmp_path / "q").exists()


JSON = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)
KEYS = ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"]
KEYS += ["mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "num_hidden_layers"]


@given(st.sampled_from(KEYS), JSON, st.sampled_from(FAMILIES))
@settings(max_examples=100, deadline=None)
def test_any_value_is_read_or_refused_in_one_line(key: str, value: Any, family: str) -> None:
    try:
        Mixture.from_config(mixture_config(family, **{key: value}), "config.json")
    except CheckpointError as refused:
        assert "\n" not in str(refused)


def test_which_layers_are_sparse() -> None:
    def sparse(**changes: Any) -> list[int]:
        mixture = Mixture.from_config(mixture_config(num_hidden_layers=6, **changes), "config.json")
        assert mixture is not None
        return [layer for layer, is_sparse in enumerate(mixture.sparse_layers) if is_sparse]

    assert sparse(mlp_only_layers=[]) == [0, 1, 2, 3, 4, 5]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [3, 5]
    assert sparse(mlp_only_layers=None, decoder_sparse_step=3) == [2, 5]
    assert Mixture.from_config({"model_type": "llama", "num_experts": 3}, "config.json") is None


def test_published_names_have_their_roles() -> None:
    for family in FAMILIES:
        router, *linears = names_of(family)
        assert role_of(router) == "router" and {role_of(name) for name in linears} == {"linear"}
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.0.w1.weight", "mlp.gate.bias", "mlp.experts.0.up_proj.bias"):
        assert role_of(f"model.layers.0.{name}") is None


def test_lint_names_a_misshapen_expert(tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "s", "mixtral")
    tensors = load_file(path / "model.safetensors")
    router, gate, *_ = names_of("mixtral")
    tensors[gate], tensors[router] = tensors[gate][:-1].copy(), tensors[router][:-1].copy()
    save_file(tensors, path / "model.safetensors")
    assert {finding.where for finding in lint_checkpoint(path)} == {gate, router}


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_hold_each_expert_and_leave_the_router(tmp_path: Path, family: str, scheme: str) -> None:
    write_mixture(tmp_path / "s", family, torch_dtype="float32")
    linears = {"scheme": scheme} if scheme == "fp8" else {**INT4, "symmetric": True}
    quantize.quantize_checkpoint(tmp_path / "s", tmp_path / "q", recipe(**linears))
    export_checkpoint(tmp_path / "q", tmp_path / "out", ExportOptions("compressed-tensors", "vllm", dtype="float32"))
    assert lint_checkpoint(tmp_path / "out") == []
    exported, (router, *_, down) = quantize.open_checkpoint(tmp_path / "out"), names_of(family)
    ignored = exported.config["quantization_config"]["ignore"]
    assert router.removesuffix(".weight") in ignored and not any(".experts." in name for name in ignored)
    np.testing.assert_array_equal(exported.load(router), mixture_weights(family)[router])
    expected = quantize.load_weight(quantize.open_checkpoint(tmp_path / "q"), down).dequantize()
    if scheme == "fp8":
        values = exported.load_float32(down)
        scales = exported.load_float32(f"{down}_scale")
    else:
        words = exported.load(f"{down}_packed").view(np.uint32)
        values = np.stack([(words >> np.uint32(4 * place)) & np.uint32(15) for place in range(8)], axis=-1)
        values = values.reshape(expected.shape).astype(np.float32) - 8
        scales = np.repeat(exported.load_float32(f"{down}_scale"), 32, axis=1)
    np.testing.assert_allclose(values * scales, expected, rtol=1e-6)


def test_exports_that_are_not_known_to_load_are_refused(tmp_path: Path) -> None:
    write_mixture(tmp_path / "s", torch_dtype="float32")

    def refused(message: str, options: ExportOptions, overrides: Any = (), **linears: Any) -> None:
        output = tmp_path / f"q{len(list(tmp_path.iterdir()))}"
        quantize.quantize_checkpoint(tmp_path / "s", output, recipe(overrides, **linears))
        with pytest.raises(ExportError, match=message) as caught:
            export_checkpoint(output, tmp_path / "out", options)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    vllm = ExportOptions("compressed-tensors", "vllm")
    refused(
        "builds qwen3_moe models with experts in every layer; layer 0 has none", ExportOptions("trtllm"), scheme="fp8"
    )
    refused("vLLM and SGLang and in the format trtllm, not as 'modelopt'", ExportOptions("modelopt"), scheme="fp8")
    refused("not known to load experts stored as int8", vllm, scheme="int8")
    refused("not known to load experts stored as int4 asymmetric", vllm, **INT4, symmetric=False)
    kept = [{"match": "*.experts.2.*", "scheme": "none"}]
    refused(r"experts\.2\.gate_proj\.weight' is not quantized; run-times stack", vllm, kept, scheme="fp8")


def test_rotations_are_for_dense_models(tmp_path: Path) -> None:
    write_mixture(tmp_path / "s")
    chosen = Recipe.model_validate({"name": "t", "linears": INT4, "rotations": ["r1"]})
    with pytest.raises(QuantizeError, match=r"rotations are for llama, mistral, .*granite models, found 'qwen3_moe'"):
        quantize.quantize_checkpoint(tmp_path / "s", tmp_path / "q", chosen)


@given(sizes=st.lists(st.integers(1, 12), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_an_experts_gram_matrix_is_that_of_its_tokens(sizes: list[int], seed: int) -> None:
    inputs = np.random.default_rng(seed).normal(size=(sum(sizes), 9)).astype(np.float32)
    expert, plain = ExpertGram(9, PRODUCTS), Gram(9, PRODUCTS)
    for part in np.split(inputs, np.cumsum(sizes)[:-1]) if sizes else ():
        expert.add([part])
        plain.add([part])
    np.testing.assert_allclose(expert.matrix(), plain.matrix(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(expert.mean_square, plain.mean_square, rtol=1e-5)
    assert expert.num_tokens == plain.num_tokens
    with pytest.raises(ValueError, match="diagonal"):
        ExpertGram(9, PRODUCTS, full=False).matrix()


def test_the_cost_counts_active_experts_for_the_work_and_all_of_them_for_the_memory() -> None:
    attention, expert = (((64, 64), (96, 64)), ((64, 128), (256, 64)))
    dense = [LayerShape((*attention, *expert * 8), "importance")]
    sparse = [LayerShape((*attention, *expert * 8), "importance", (1.0, 1.0) + (0.25,) * 16)]
    two = [LayerShape((*attention, *expert * 2), "importance")]
    costs = {name: estimate_cost(layers, 64, 4, 32, 1e9) for name, layers in (("d", dense), ("s", sparse), ("t", two))}
    counted_and_rounded = 2 * costs["t"].flops
    assert costs["s"].flops == pytest.approx(counted_and_rounded) and counted_and_rounded < 0.65 * costs["d"].flops
    assert costs["s"].ram_bytes == costs["d"].ram_bytes > 2 * costs["t"].ram_bytes
    gptq = LayerShape((*attention, *expert * 8), "gptq", (1.0, 1.0) + (0.25,) * 16)
    few, many = (gptq.rounding_bytes(num_tokens) for num_tokens in (100, 10_000))
    assert few < many, "an expert's few inputs are kept instead of their matrix"


def test_a_large_model_is_planned_from_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 layers of 128 experts, as Qwen3-30B-A3B has them: no tensor is read."""
    config = mixture_config(
        num_hidden_layers=48, num_experts=128, moe_intermediate_size=768, hidden_size=2048, mlp_only_layers=[]
    )
    source = write_mixture(tmp_path / "s")
    checkpoint = quantize.open_checkpoint(source)
    checkpoint.config = config
    from quantize.model_shape import ModelShape

    shape = ModelShape.from_config(config, "config.json")
    infos = {name: TensorInfo(name, "bfloat16", size, 2) for name, size in shape.other_tensors()}
    for name, linear in shape.linear_weights():
        infos[name] = TensorInfo(name, "bfloat16", (linear.out_features, linear.in_features), 2)
    monkeypatch.setattr(SafetensorsCheckpoint, "names", lambda self: list(infos))
    monkeypatch.setattr(SafetensorsCheckpoint, "__contains__", lambda self, name: name in infos)
    monkeypatch.setattr(SafetensorsCheckpoint, "info", lambda self, name: infos[name])
    monkeypatch.setattr(SafetensorsCheckpoint, "load_dtype", lambda self, name: np.dtype(np.float32))
    planned = plan_tensors(checkpoint, recipe([{"match": "*.down_proj.*", "scheme": "int8"}], scheme="nvfp4"))
    assert sum(tensor.scheme == "int8" for tensor in planned) == 48 * 128
    assert len(planned) == 48 * (4 + 4 + 1 + 3 * 128) + 3 and EXPERTS == 4
