"""Real plans of small random models, compiled by TensorRT-RTX without a GPU. None of them has been executed."""

from pathlib import Path

import numpy as np
import pytest
from random_models import save_model

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.tensorrt.build import build_rank, write_rank_weights
from builder.targets.tensorrt.module import load_module
from builder.targets.tensorrt.options import NetworkOptions
from plansmith_errors import BuildError
from quantize import Recipe, open_checkpoint, quantize_checkpoint
from quantize.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.integration

OPTIONS = NetworkOptions(max_batch_size=4, max_num_tokens=128, max_seq_len=256, tokens_per_block=16, sms=(89,))
FP8_TOKEN = {"scheme": "fp8", "activations": "fp8", "activation_scale": "token"}
INT8_TOKEN = {"scheme": "int8", "activations": "int8", "activation_scale": "token"}
PRECISIONS = {  # linears of a recipe, architectures
    "none": ({"scheme": "none"}, (75, 89, 120)),
    "int4": ({"scheme": "int4", "group_size": 32}, (80, 89, 120)),
    "int4 with zero points": ({"scheme": "int4", "group_size": 64, "symmetric": False}, (89, 120)),
    "int4 per channel": ({"scheme": "int4", "group_size": "channel"}, (89, 120)),
    "int8": ({"scheme": "int8"}, (75, 89, 120)),
    "int8 inputs": (INT8_TOKEN, (75, 89, 120)),
    "fp8": ({"scheme": "fp8"}, (89, 120)),
    "fp8 of the tensor": ({"scheme": "fp8", "granularity": "tensor"}, (89, 120)),
    "fp8 in blocks": ({"scheme": "fp8", "granularity": "block"}, (89, 120)),
    "fp8 inputs": (FP8_TOKEN, (89, 120)),
    "nvfp4": ({"scheme": "nvfp4"}, (120, 121)),
    "mxfp4": ({"scheme": "mxfp4"}, (120,)),
    "mxfp8": ({"scheme": "mxfp8"}, (89, 120)),
}


@pytest.fixture(scope="module")
def trt():
    return load_module("tensorrt-rtx")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model(path, "llama", {})
    return path


def rank_of(path, rank):
    checkpoint = open_checkpoint(path)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    return spec_of_rank(spec, rank), ShardedWeights(WeightSource(checkpoint, spec), spec, rank)


def build(trt, path, output, rank=None, **options):
    rank = rank or Rank()
    spec, weights = rank_of(path, rank)
    output.mkdir(exist_ok=True)
    return build_rank(trt, spec, weights, rank, NetworkOptions(**{**vars(OPTIONS), **options}), output)


@pytest.mark.parametrize("weights", ["embedded", "external"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_compiles_for_its_architectures(trt, llama, tmp_path, precision, weights):
    linears, sms = PRECISIONS[precision]
    quantize_checkpoint(llama, tmp_path / "model", Recipe.model_validate({"name": "test", "linears": linears}))
    record = build(trt, tmp_path / "model", tmp_path / "engine", sms=sms, weights=weights)
    files = {file.name for file in (tmp_path / "engine").iterdir()}
    assert files == {"rank0.plan", *(["rank0.safetensors"] if weights == "external" else [])} == set(record.file_names)
    (plan,) = record.plans
    assert plan.modes == ("mixed", "decode")
    assert plan.footprint.activation_bytes > 0
    embedded = plan.footprint.weights_bytes > 100_000
    assert embedded == (weights == "embedded")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pools_of_each_type_compile(trt, llama, tmp_path, dtype, kv_dtype):
    record = build(trt, llama, tmp_path, dtype=dtype, kv_dtype=kv_dtype)
    per_head = 2 * 16 if kv_dtype == "auto" else 16 + 4  # a scale of each token beside eight-bit values
    assert record.kv_bytes_per_block == 2 * 2 * 4 * 16 * per_head  # keys and values, layers, heads, tokens


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 20, "pad_token_id": 0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_soft_caps_windows_and_experts_compile(trt, tmp_path, family, settings):
    save_model(tmp_path / "model", family, settings)
    record = build(trt, tmp_path / "model", tmp_path / "engine", dtype="bfloat16", sms=(89, 120))
    assert (tmp_path / "engine" / "rank0.plan").stat().st_size > 1_000_000
    assert record.plans[0].layers["MATRIX_MULTIPLY"] > 14


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_two_stages_of_two_compile(trt, llama, tmp_path, rank):
    record = build(trt, llama, tmp_path, Rank(Parallelism(tp_size=2, pp_size=2), rank))
    assert (record.first_layer, record.num_layers) == (rank // 2, 1)
    assert record.plans[0].layers["DIST_COLLECTIVE"] == 3  # attention, MLP, and embedding or head


def test_another_fine_tune_is_a_file_beside_the_same_plan(trt, llama, tmp_path):
    build(trt, llama, tmp_path, weights="external")
    plan = (tmp_path / "rank0.plan").read_bytes()
    spec, weights = rank_of(llama, Rank())
    options = NetworkOptions(**{**vars(OPTIONS), "weights": "external"})
    write_rank_weights(trt, spec, weights, Rank(), options, tmp_path / "again.safetensors")
    first, again = (SafetensorsFile(tmp_path / name) for name in ("rank0.safetensors", "again.safetensors"))
    assert first.tensors.keys() == again.tensors.keys()
    assert all(np.array_equal(first.view(name), again.view(name)) for name in first.tensors)
    assert (tmp_path / "rank0.plan").read_bytes() == plan


def test_a_type_that_an_architecture_lacks_leaves_no_file(trt, llama, tmp_path):
    with pytest.raises(BuildError, match="sm75 does not compute bfloat16; sm75: float16, int8; sm80"):
        build(trt, llama, tmp_path / "engine", dtype="bfloat16", sms=(75,))
    assert not any((tmp_path / "engine").iterdir())


def test_what_the_builder_refuses_is_told_in_its_words(trt, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("builder.targets.tensorrt.build.check_types", lambda types, sms, target: None)
    with pytest.raises(BuildError, match=r"^TensorRT cannot build the plan: Cannot compile for target\(s\) sm75"):
        build(trt, llama, tmp_path / "engine", dtype="bfloat16", sms=(75,), weights="external")
    assert not any((tmp_path / "engine").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_as_such(trt, llama, tmp_path):
    (tmp_path / "rank0.plan").symlink_to("/dev/full")
    with pytest.raises(BuildError, match=r"rank0.plan: cannot be written: No space left on device"):
        build(trt, llama, tmp_path)


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_a_rank_with_any_number_of_heads_compiles(trt, tmp_path, num_heads):
    """TensorRT has no fused attention of three query heads, which is what a third of SmolLM2's nine are."""
    heads = {
        "hidden_size": 576,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(num_heads // 3, 1),
        "head_dim": 64,
    }
    save_model(tmp_path / "model", "llama", heads)
    assert build(trt, tmp_path / "model", tmp_path / "engine").plans
