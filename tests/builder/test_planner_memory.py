"""What fits: the memory of a GPU is shared out without remainder, and more of anything leaves less for the rest."""

import public_configs as configs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import plan, precision

from builder.parallel import Parallelism
from builder.planner.advice import what_would_fit
from builder.planner.footprint import StepLimits, activation_bytes
from builder.planner.from_config import read_decoder_shape
from builder.planner.legality import legal_tp_sizes, obstacle
from builder.planner.stage import pipeline_stages
from plansmith_errors import BuildError, QuantizeError


def one(config, tp_size=1, pp_size=1, **changes):
    return plan(config, num_gpus=tp_size * pp_size, tp_size=tp_size, pp_size=pp_size, **changes).layouts[0]


def test_the_parts_of_a_gpus_memory_are_all_of_it():
    for layout in plan(configs.LLAMA31_70B, weights="fp8").layouts:
        for part in layout.footprints:
            used = part.reserved + part.weights + part.activations + part.logits + part.margin
            assert used + part.kv_cache == part.memory == 81559 << 20
            assert part.margin == pytest.approx((part.margin + part.kv_cache) / 10)


def test_sequences_take_whole_blocks():
    layout = one(configs.LLAMA31_8B, context=4000)  # 62.5 blocks of 64 tokens
    assert layout.num_sequences == layout.num_blocks // 63
    assert layout.footprint.bytes_per_block == 64 * 128 * 1024
    assert layout.num_tokens == 64 * layout.num_blocks
    assert layout.num_blocks == layout.footprint.kv_cache // layout.footprint.bytes_per_block


def test_the_largest_batch_is_the_largest():
    """An engine for that many sequences holds them all; one for one more does not."""
    for layout in (one(configs.LLAMA31_8B), one(configs.MIXTRAL_8X7B, 4, weights="fp8")):
        largest = layout.largest_batch
        sizes = {"tp_size": layout.parallelism.tp_size, "weights": layout.precision.label}
        config = configs.LLAMA31_8B if sizes["tp_size"] == 1 else configs.MIXTRAL_8X7B
        assert one(config, **sizes, max_batch_size=largest).num_sequences >= largest
        assert one(config, **sizes, max_batch_size=largest + 1).num_sequences < largest + 1


@given(
    st.integers(1, 256),
    st.integers(1, 8192),
    st.integers(64, 32768),
    st.sampled_from(["max_batch_size", "max_num_tokens", "max_seq_len"]),
)
def test_larger_limits_never_need_less(batch, tokens, length, larger):
    (stage,) = pipeline_stages(read_decoder_shape(configs.LLAMA31_8B), precision(), Parallelism())
    limits = {"max_batch_size": batch, "max_num_tokens": tokens, "max_seq_len": length}
    more = limits | {larger: 2 * limits[larger]}
    assert activation_bytes(stage, StepLimits(**limits)) <= activation_bytes(stage, StepLimits(**more))


def test_more_ranks_than_key_value_heads_copy_them():
    """Qwen2.5-7B has 28 heads and 4 of keys and values; llama 70B has 8, so sixteen ranks hold each twice."""
    per_rank = {tp: one(configs.LLAMA31_70B, tp, weights="fp8").stages[0].kv_elements for tp in (1, 2, 4, 8, 16)}
    assert per_rank == {1: 163840, 2: 81920, 4: 40960, 8: 20480, 16: 20480}
    shape = read_decoder_shape(configs.QWEN25_7B)
    assert legal_tp_sizes(shape, precision(), 28) == [1, 2, 4]  # 7 divides 28 heads, but not 4


def test_latent_attention_leaves_the_same_on_every_rank():
    layouts = {layout.parallelism: layout for layout in plan(configs.DEEPSEEK_V3, "h200", 8, "fp8-block").layouts}
    for parallelism in (Parallelism(1), Parallelism(8), Parallelism(8, 1, 8)):
        assert layouts[parallelism].stages[0].kv_elements == 61 * (512 + 64)
    assert layouts[Parallelism(1, 8)].stages[0].kv_elements == 8 * (512 + 64)  # the first of stages of 8 and 7 layers


def test_stages_of_a_pipeline_share_the_layers_and_the_ends():
    layout = one(configs.LLAMA31_8B, 1, 3)
    assert [stage.num_layers for stage in layout.stages] == [11, 11, 10]
    first, middle, last = (stage.weight_bytes for stage in layout.stages)
    embeddings = 2 * 128256 * 4096
    assert first - middle == embeddings and layout.stages[1].embeddings is None
    assert last == middle * 10 // 11 + embeddings + 2 * 4096  # and the last norm
    assert layout.tightest == 0
    tied = one(configs.LLAMA31_8B | {"tie_word_embeddings": True}, 1, 2)
    assert tied.stages[1].weight_bytes == tied.stages[0].weight_bytes + 2 * 4096  # both have it


def test_experts_whole_on_a_rank_have_smaller_activations_than_parts_of_all():
    whole = one(configs.QWEN3_235B_A22B, 8, weights="fp8", ep_size=8)
    parts = one(configs.QWEN3_235B_A22B, 8, weights="fp8", ep_size=1)
    assert whole.footprint.weights == pytest.approx(parts.footprint.weights, rel=1e-2)  # parts repeat scales of rows
    assert whole.footprint.activations < parts.footprint.activations / 3


@pytest.mark.parametrize(
    ("config", "weights", "parallelism", "reason"),
    [
        (configs.LLAMA31_70B, "bf16", Parallelism(3), "64 attention heads are no multiple"),
        (configs.QWEN25_7B, "bf16", Parallelism(7), "4 key-value heads are neither a multiple nor a divisor"),
        (configs.LLAMA31_8B, "bf16", Parallelism(1, 33), "the model has 32 layers"),
        (configs.LLAMA31_8B | {"vocab_size": 128257}, "bf16", Parallelism(2), "vocabulary of 128257"),
        (configs.LLAMA31_8B | {"intermediate_size": 14338}, "bf16", Parallelism(4), "14338 columns, no multiple of 4"),
        (configs.QWEN25_7B, "int4", Parallelism(4), None),
        (configs.QWEN25_7B | {"intermediate_size": 18944 + 96}, "nvfp4", Parallelism(4), "tear nvfp4 groups of 16"),
        (configs.DEEPSEEK_V3, "fp8-block", Parallelism(16), None),
        (configs.DEEPSEEK_V3, "fp8-block", Parallelism(32), "a rank's 576 of model.layers.0.mlp.gate_proj.weight tear"),
        (configs.LLAMA31_8B, "bf16", Parallelism(4, 1, 2), "ep_size 2"),
        (configs.MIXTRAL_8X7B, "bf16", Parallelism(4, 1, 3), "ep_size 3"),
    ],
)
def test_what_cannot_be_split_says_why(config, weights, parallelism, reason):
    found = obstacle(read_decoder_shape(config), precision(weights), parallelism)
    assert found is None if reason is None else reason in found


def test_the_smallest_layout_is_the_one_with_the_fewest_gpus():
    result = plan(configs.LLAMA31_70B, num_gpus=8)  # 141 GB in 16 bits
    assert result.smallest.parallelism == Parallelism(2)  # a split by tensors is quicker than a pipeline
    assert [layout.fits for layout in result.layouts if layout.parallelism.world_size == 1] == [False]
    crowded = plan(configs.LLAMA31_70B, num_gpus=8, batch_size=64, context=8192)
    assert crowded.smallest.parallelism == Parallelism(4)
    assert crowded.smallest.num_sequences >= 64


def test_experts_whole_on_each_rank_are_preferred_where_they_leave_more_room():
    assert plan(configs.DEEPSEEK_V3, "h200", 8, "fp8-block").smallest.parallelism == Parallelism(8, 1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_gpus": 97},
            "97 GPUs are no product of legal sizes; the nearest number is 96; legal are tp_size 1, 2, 4",
        ),
        ({"num_gpus": 8, "tp_size": 3}, "64 attention heads are no multiple of it; legal are tp_size 1, 2, 4, 8"),
        ({"num_gpus": 6, "tp_size": 4}, "6 GPUs are no multiple of tp_size 4"),
        ({"num_gpus": 8, "tp_size": 2, "pp_size": 81}, "the model has 80 layers"),
        ({"num_gpus": 8, "ep_size": 2}, "ep_size 2: must divide"),
        ({"num_gpus": 0}, "--gpus is 0"),
    ],
)
def test_gpus_that_cannot_all_be_used_are_refused(changes, message):
    with pytest.raises(BuildError, match=message) as refused:
        plan(configs.LLAMA31_70B, **changes)
    assert "\n" not in str(refused.value)


def test_a_recipe_that_does_not_divide_the_model_is_refused():
    with pytest.raises(QuantizeError, match="group_size 64 does not divide"):
        plan(configs.QWEN25_7B | {"hidden_size": 3600, "head_dim": 128}, num_gpus=1, weights="int4")


def test_what_would_fit_where_nothing_does():
    ways = what_would_fit(plan(configs.LLAMA31_405B, num_gpus=8).request)  # 812 GB in 16 bits
    assert ways[0] == "--weights fp8 on 8 x h100-80g"
    assert ways[1].startswith("--gpus 16 (tp ")
    assert ways[2] == "--gpu h200"
