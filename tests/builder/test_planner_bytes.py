"""The planner's bytes are those of the quantized checkpoint, and of each rank's part of it."""

import json

import public_configs as configs
import pytest
from calibrated_llama import save_with_tokenizer
from planning import plan, precision
from tiny_models import save_model

import quantize
from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.planner.from_config import read_decoder_shape
from builder.planner.gpu import find_gpu
from builder.planner.legality import obstacle
from builder.planner.precision import Precision, missing_formats, resolve_recipe
from builder.planner.stage import pipeline_stages
from builder.planner.stored import read_stored
from builder.sharding.legality import check_parallelism
from builder.sharding.weights import ShardedWeights
from plansmith_errors import BuildError, ConfigError
from quantize.recipe import Recipe

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3, "attention_bias": True}
RULES = {
    "none": {"scheme": "none"},
    "int4": {"scheme": "int4", "group_size": 64, "symmetric": True},
    "int4, groups of 128": {"scheme": "int4", "group_size": 128},
    "int4, zero points": {"scheme": "int4", "group_size": 32, "symmetric": False},
    "int4, a scale for each row": {"scheme": "int4", "group_size": "channel"},
    "int8": {"scheme": "int8"},
    "fp8": {"scheme": "fp8"},
    "fp8 of the tensor": {"scheme": "fp8", "granularity": "tensor"},
    "fp8 blocks": {"scheme": "fp8", "granularity": "block"},
    "nvfp4": {"scheme": "nvfp4"},
    "mxfp4": {"scheme": "mxfp4"},
    "mxfp8": {"scheme": "mxfp8"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "source"
    save_with_tokenizer(path, **SIZES)
    return path


def make_recipe(rule, **changes):
    data = {"name": "test", "linears": rule, "embeddings": {"scheme": "int8"}, "lm_head": {"scheme": "none"}}
    return Recipe.model_validate({**data, "keep_dtype": "bfloat16", **changes})


def quantized(source, output, recipe):
    quantize.quantize_checkpoint(source, output, recipe)
    checkpoint = quantize.open_checkpoint(output)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    return checkpoint, WeightSource(checkpoint, spec), spec


def stored_bytes(weights, shapes):
    """Of matrices as stored; norms and biases in 16 bits, as an engine has them."""
    return sum(2 * shape[0] if len(shape) == 1 else weights.stored(name).nbytes for name, shape in shapes.items())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_ranks_bytes_are_those_of_its_slices(source, tmp_path, rule):
    recipe = make_recipe(rule)
    checkpoint, weights, spec = quantized(source, tmp_path / "out", recipe)
    shape = read_decoder_shape(checkpoint.config)
    for parallelism in (
        Parallelism(),
        Parallelism(2),
        Parallelism(4),
        Parallelism(8),
        Parallelism(2, 3),
        Parallelism(1, 2),
    ):
        planned = Precision("test", recipe, "fp16")
        if obstacle(shape, planned, parallelism) is not None:
            with pytest.raises(BuildError):
                check_parallelism(spec, parallelism, weights)
            continue
        check_parallelism(spec, parallelism, weights)
        for stage, costs in enumerate(pipeline_stages(shape, planned, parallelism)):
            part = ShardedWeights(weights, spec, Rank(parallelism, stage * parallelism.tp_size))
            assert costs.weight_bytes == stored_bytes(part, part.shapes)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_spread_as_they_are_sharded(tmp_path, family):
    sizes = {"num_local_experts" if family == "mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
    save_model(tmp_path / "source", family, intermediate_size=128, moe_intermediate_size=128, **sizes)
    recipe = make_recipe({"scheme": "int8"}, lm_head={"scheme": "int8"})
    checkpoint, weights, spec = quantized(tmp_path / "source", tmp_path / "out", recipe)
    shape = read_decoder_shape(checkpoint.config)
    for parallelism in (
        Parallelism(),
        Parallelism(2),
        Parallelism(2, 1, 2),
        Parallelism(4, 1, 2),
        Parallelism(4, 2, 4),
    ):
        check_parallelism(spec, parallelism, weights)
        stages = pipeline_stages(shape, Precision("test", recipe, "fp16"), parallelism)
        for stage, costs in enumerate(stages):
            part = ShardedWeights(weights, spec, Rank(parallelism, stage * parallelism.tp_size))
            assert costs.weight_bytes == stored_bytes(part, part.shapes)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_quantized_checkpoint_is_planned_as_it_is_stored(tmp_path, is_tied):
    save_with_tokenizer(tmp_path / "source", **SIZES, tie_word_embeddings=is_tied)
    head = {"embeddings": {"scheme": "none"}, "lm_head": None} if is_tied else {}
    overrides = [
        {"match": "*.down_proj.weight", "scheme": "int8"},
        {"match": "*.layers.1.*", "scheme": "nvfp4", "scale": "mse"},
        {"match": "*.layers.2.self_attn.*", "scheme": "fp8", "granularity": "block"},
    ]
    recipe = make_recipe(RULES["int4"], overrides=overrides, **head)
    _, weights, spec = quantized(tmp_path / "source", tmp_path / "out", recipe)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    label, kept, rules, kv_cache = read_stored(config, "config.json")
    assert (label, kv_cache) == ("test, as stored", None)
    shape = read_decoder_shape(config)
    (by_config,) = pipeline_stages(shape, Precision(label, kept, "fp16", stored=rules), Parallelism())
    (by_recipe,) = pipeline_stages(shape, Precision("test", recipe, "fp16"), Parallelism())
    whole = ShardedWeights(weights, spec, Rank())
    assert by_config.weight_bytes == by_recipe.weight_bytes == stored_bytes(whole, whole.shapes)


def test_deepseeks_published_weights_are_fp8_in_blocks():
    label, recipe, rules, _ = read_stored(configs.DEEPSEEK_V3, "config.json")
    assert recipe.linears.granularity == "block" and not rules and "published" in label
    result = plan(configs.DEEPSEEK_V3, "h200", 8, "fp8-block")
    linears = 671_026_404_352 - 2 * 129280 * 7168  # a byte each, but for the head, embeddings and routers
    whole = sum(stage.weight_bytes for stage in plan(configs.DEEPSEEK_V3, "h200", 8, "fp8-block").layouts[0].stages)
    assert whole == pytest.approx(linears + 2 * 2 * 129280 * 7168, rel=1e-3)
    assert result.smallest.parallelism.world_size == 8


@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "plansmith", "format_version": 1},
        [],
    ],
)
def test_sizes_that_a_config_does_not_say_are_asked_for(found):
    with pytest.raises(ConfigError, match=r"--weights|quantiz"):
        read_stored({"quantization_config": found}, "config.json")
    entry = {"quant_method": "plansmith", "format_version": 1, "tensors": {"a": {"scheme": "int3"}}}
    with pytest.raises(ConfigError, match="does not describe tensors"):
        read_stored({"quantization_config": entry}, "config.json")


def test_an_automatic_choice_is_planned_at_its_budget():
    (layout,) = plan(configs.LLAMA31_8B, num_gpus=1, weights="mixed-auto").layouts  # five bits per weight
    linears = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert layout.footprint.weights == pytest.approx(linears * 5 / 8 + 2 * 128256 * 4096, rel=2e-3)


def test_a_choice_by_error_has_no_size_before_it_is_made(tmp_path):
    rule = "auto: {candidates: [{scheme: int4}, {scheme: int8}], budget: {kl: 0.1}}"
    (tmp_path / "recipe.yaml").write_text(f"name: mine\n{rule}\n")
    with pytest.raises(ConfigError, match=r"'mine': auto.budget.kl says no size before it is measured"):
        resolve_recipe(str(tmp_path / "recipe.yaml"))


def test_formats_that_a_gpu_does_not_multiply_are_named():
    assert missing_formats(precision("fp8"), find_gpu("a100")) == ["fp8"]
    assert missing_formats(precision("fp8"), find_gpu("h100")) == []
    assert missing_formats(precision("nvfp4-w4a4"), find_gpu("h100")) == ["fp4"]
    assert missing_formats(precision("bf16"), find_gpu("t4")) == ["bf16"]
    assert missing_formats(precision("int4"), find_gpu("a100")) == []  # weights alone
