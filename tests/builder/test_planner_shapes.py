"""Published models are planned for from their config.json alone, with the numbers that their publishers state."""

import public_configs as configs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import plan

from builder.planner.from_config import read_decoder_shape
from plansmith_errors import BuildError, PlansmithError

KIB = 1024


@pytest.mark.parametrize(
    ("config", "num_parameters"),  # as Hugging Face counts the published tensors
    [
        (configs.LLAMA31_8B, 8_030_261_248),
        (configs.LLAMA31_70B, 70_553_706_496),
        (configs.LLAMA31_405B, 405_853_388_800),
        (configs.QWEN25_7B, 7_615_616_512),
        (configs.MIXTRAL_8X7B, 46_702_792_704),
        (configs.QWEN3_235B_A22B, 235_093_634_560),
        (configs.GEMMA2_9B, 9_241_705_984),
        (configs.PHI3_MINI, 3_821_079_552),
        (configs.DEEPSEEK_V3, 671_026_419_200 - 58 * 256),  # without the routers' corrections of load
    ],
)
def test_every_parameter_is_counted(config, num_parameters):
    assert read_decoder_shape(config).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("config", "billions"),
    # as stated in arXiv 2401.04088 (Mixtral), 2505.09388 (Qwen3) and 2412.19437 (DeepSeek-V3)
    [(configs.MIXTRAL_8X7B, 13), (configs.QWEN3_235B_A22B, 22), (configs.DEEPSEEK_V3, 37)],
)
def test_of_experts_only_the_chosen_ones_are_active(config, billions):
    assert read_decoder_shape(config).num_active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        # "Llama 3.1", huggingface.co/blog/llama31: 0.125 GB for 1k tokens of the 8B model and 0.313 GB of the 70B one
        (configs.LLAMA31_8B, 0.125 * 2**30 / 1024),
        (configs.LLAMA31_70B, 0.3125 * 2**30 / 1024),
        (configs.LLAMA31_405B, 126 * 8 * 128 * 2 * 2),
        # "Insights into DeepSeek-V3", arXiv 2505.09343, table 1: 70.272 KB for DeepSeek-V3, in kilobytes of 1000
        (configs.DEEPSEEK_V3, 70.272e3),
    ],
)
def test_what_a_token_leaves_in_a_16_bit_cache(config, bytes_per_token):
    shape = read_decoder_shape(config)
    assert 2 * sum(layer.attention.kv_elements(1) for layer in shape.layers) == bytes_per_token


def test_llama_70b_in_fp8_on_four_h100():
    """70.6B parameters take about 70 GB in FP8 (huggingface.co/blog/llama31), and 160 KiB of FP8 cache for a token."""
    result = plan(configs.LLAMA31_70B, num_gpus=4, weights="fp8", kv_cache="fp8", tp_size=4, pp_size=1)
    (layout,) = result.layouts
    stored = 4 * layout.footprint.weights  # of four ranks
    linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)  # a byte each
    embeddings = 2 * 2 * 128256 * 8192  # and the head, in 16 bits
    assert stored == pytest.approx(linears + embeddings, rel=1e-3)  # scales and norms are the rest
    assert stored / 1e9 == pytest.approx(70, rel=0.05)
    assert layout.stages[0].kv_elements * 4 == 160 * KIB  # a quarter on each rank
    assert layout.fits and layout.footprint.weights < 20e9
    # What is left over of 85.5 GB is the cache: over a million tokens.
    assert layout.num_tokens * 40 * KIB <= layout.footprint.kv_cache < 85.5e9 - layout.footprint.weights
    assert layout.num_tokens > 1_000_000


@pytest.mark.parametrize("config", [configs.LLAMA31_405B, configs.DEEPSEEK_V3, configs.QWEN3_235B_A22B])
def test_the_largest_models_fit_on_sixteen_b200(config):
    assert plan(config, "b200", 16, "fp8").smallest is not None


def test_what_cannot_be_built_says_so():
    assert "'deepseek_v3' cannot be built yet" in (read_decoder_shape(configs.DEEPSEEK_V3).why_not_built or "")
    assert read_decoder_shape(configs.LLAMA31_8B).why_not_built is None


def test_a_model_that_sees_is_planned_by_its_language_part():
    """Gemma 3 4B has 4.3B parameters with its eyes (arXiv 2503.19786, table 1: 417M of vision), 3.88B without."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    shape = read_decoder_shape({"model_type": "gemma3", "text_config": text})
    assert shape.num_parameters / 1e9 == pytest.approx(3.88, abs=0.005)
    assert shape.why_not_built is None and shape.layers[5].attention.window is None
    assert [layer.attention.window for layer in shape.layers[:5]] == [1024] * 5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (configs.LLAMA31_8B, {"hidden_size": None}, "hidden_size is missing"),
        (configs.DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (configs.DEEPSEEK_V3, {"num_experts_per_tok": 300}, "num_experts_per_tok is 300; expected at most"),
        (configs.DEEPSEEK_V3, {"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824"),
        (configs.LLAMA31_8B, {"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824"),
        (configs.LLAMA31_8B, {"model_type": "mamba"}, "'mamba' cannot be planned for; known architectures: llama"),
    ],
)
def test_a_config_that_lacks_something_is_refused_in_one_line(config, changes, message):
    with pytest.raises(BuildError, match=message) as refused:
        read_decoder_shape(config | changes, "here/config.json")
    assert "\n" not in str(refused.value) and "here/config.json" in str(refused.value)


VALUES = (
    st.none() | st.booleans() | st.integers(-1, 2**33) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@given(st.sampled_from(sorted(configs.DEEPSEEK_V3)), VALUES)
def test_any_value_is_read_or_refused(key, value):
    try:
        read_decoder_shape(configs.DEEPSEEK_V3 | {key: value})
    except PlansmithError as refused:
        assert "\n" not in str(refused)
