"""Times: never below what the bytes and operations of a step take at the peak of the hardware."""

import public_configs as configs
import pytest
from planning import plan

HBM, FP8, BF16, NVLINK = 3.35e12, 1.979e15, 0.989e15, 450e9  # H100 SXM, dense, one direction


def one(config, tp_size=1, pp_size=1, gpu="h100-80g", **changes):
    return plan(config, gpu, tp_size * pp_size, tp_size=tp_size, pp_size=pp_size, **changes).layouts[0]


def test_a_token_of_one_sequence_takes_as_long_as_reading_the_weights():
    layout = one(configs.LLAMA31_70B, weights="fp8", kv_cache="fp8", context=1024)
    step = layout.decode(1)
    read = layout.footprint.weights - 2 * 128256 * 8192 + 1024 * 160 * 1024  # not the embeddings; the cache too
    assert step.bound == "memory"
    assert step.seconds == pytest.approx(read / HBM, rel=1e-3)


def test_a_large_batch_is_bound_by_arithmetic():
    layout = one(configs.LLAMA31_8B, gpu="a100", context=64)
    assert layout.decode(1).bound == "memory" and layout.decode(1024).bound == "compute"
    linears = 2 * 1024 * (8_030_261_248 - 128256 * 4096)
    assert layout.decode(1024).compute == pytest.approx(linears / 312e12, rel=0.01)


def test_prefill_multiplies_every_weight_and_sees_half_of_all_pairs():
    layout = one(configs.LLAMA31_8B, context=8192, max_num_tokens=8192)
    step = layout.prefill
    linears = 2 * 8192 * (8_030_261_248 - 2 * 128256 * 4096)
    pairs = 32 * 4 * 32 * 128 * 8192 * 8193 / 2
    assert step.bound == "compute" and step.num_tokens == 8192
    assert step.compute == pytest.approx((linears + pairs) / BF16, rel=0.01)


def test_a_prompt_in_many_chunks_reads_the_weights_for_each():
    whole, chunks = (one(configs.LLAMA31_8B, context=8192, max_num_tokens=size).prefill for size in (8192, 16))
    assert chunks.seconds > whole.seconds and chunks.bound == "memory"
    assert chunks.memory > 512 * 14e9 / HBM


def test_ranks_exchange_twice_a_layer():
    """nccl-tests, doc/PERFORMANCE.md: a ring sends 2 (n - 1) / n of the bytes of a sum."""
    alone, four = one(configs.LLAMA31_70B, weights="fp8"), one(configs.LLAMA31_70B, 4, weights="fp8")
    assert alone.decode(32).communication == 0
    sums = 161 * 2 * 3 / 4 * 32 * 8192 * 2  # of 80 layers and the embeddings
    logits = 3 / 4 * 32 * 128256 * 4
    assert four.decode(32).communication == pytest.approx((sums + logits) / NVLINK)
    assert four.decode(1).seconds < alone.decode(1).seconds / 3


def test_a_pipeline_hands_on_hidden_states_and_is_no_quicker():
    alone, two = one(configs.LLAMA31_8B), one(configs.LLAMA31_8B, 1, 2)
    assert two.decode(8).communication == pytest.approx(8 * 4096 * 2 / NVLINK)
    assert two.decode(8).memory == pytest.approx(alone.decode(8).memory)


def test_without_nvlink_sums_go_over_pcie():
    pcie, nvlink = (one(configs.LLAMA31_8B, 2, gpu=gpu).prefill.communication for gpu in ("l40s", "h100"))
    assert pcie / nvlink == pytest.approx(450 / 32)
    eight, sixteen = (one(configs.LLAMA31_70B, tp).prefill.communication for tp in (8, 16))  # NVLink joins eight
    assert sixteen / eight == pytest.approx(450 / 64 * (15 / 16) / (7 / 8), rel=1e-3)


def test_one_token_reads_the_experts_that_it_chose_and_many_read_all():
    layout = one(configs.MIXTRAL_8X7B, 2, context=64)
    experts = 32 * 8 * 3 * 4096 * 14336  # a rank has half of each, in two bytes
    rest = layout.decode(1).memory * HBM - experts * 2 / 8
    assert rest == pytest.approx(46_702_792_704 - experts - 32000 * 4096, rel=0.01)
    assert layout.decode(64).memory * HBM == pytest.approx(rest + experts, rel=0.02)


def test_layers_with_a_window_read_no_more_of_the_cache_than_they_see():
    windowed = configs.MIXTRAL_8X7B | {"sliding_window": 1024}
    times = [one(config, 2, context=32768).decode(1).memory for config in (windowed, configs.MIXTRAL_8X7B)]
    assert (times[1] - times[0]) * HBM == pytest.approx(31744 * 32 * 4 * 128 * 2 * 2)
    assert one(windowed, 2).footprint.kv_cache == one(configs.MIXTRAL_8X7B, 2).footprint.kv_cache


def test_formats_multiply_at_their_own_rate_where_the_gpu_has_them():
    prefill = {
        (weights, gpu): one(configs.LLAMA31_8B, gpu=gpu, weights=weights, context=8192).prefill.compute
        for weights in ("bf16", "fp8", "int4", "int8-sq", "nvfp4-w4a4")
        for gpu in ("h100", "b200")
    }
    assert prefill["fp8", "h100"] < 0.62 * prefill["bf16", "h100"]
    assert prefill["int8-sq", "h100"] == pytest.approx(prefill["fp8", "h100"])
    assert prefill["int4", "h100"] == pytest.approx(prefill["bf16", "h100"])  # weights alone
    assert prefill["nvfp4-w4a4", "h100"] == pytest.approx(prefill["bf16", "h100"])  # no fp4 on Hopper
    assert prefill["nvfp4-w4a4", "b200"] < 0.7 * prefill["fp8", "b200"]
