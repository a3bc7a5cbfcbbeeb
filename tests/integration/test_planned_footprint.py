"""The planner's activation memory beside what TensorRT-RTX's builder states for the same network. Compiled, not run."""

import numpy as np
import pytest

from builder.model_spec import ModelSpec
from builder.network.weights import expected_weights
from builder.parallel import Parallelism, Rank
from builder.planner.footprint import StepLimits, activation_bytes
from builder.planner.from_config import read_decoder_shape
from builder.planner.precision import Precision, resolve_recipe
from builder.planner.stage import pipeline_stages
from builder.targets.tensorrt.build_log import parse_footprint
from builder.targets.tensorrt.module import load_module
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import NetworkOptions
from quantize.quantized_tensor import QuantizedTensor

pytestmark = pytest.mark.integration

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
}
WIDE_GROUPS = {"hidden_size": 2048, "num_key_value_heads": 2, "intermediate_size": 1792}  # a quarter of 70B's heads
GEMMA2 = {
    "model_type": "gemma2",
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024}


class RandomWeights:
    """float16 weights of a model that was never trained."""

    def __init__(self, spec):
        self.shapes = expected_weights(spec)
        self._rng = np.random.default_rng(0)

    def matrix(self, name):
        values = 0.02 * self._rng.standard_normal(self.shapes[name], np.float32)
        return QuantizedTensor("none", self.shapes[name], values.astype(np.float16))

    def vector(self, name):
        return np.ones(self.shapes[name], np.float32)

    def kv_scales(self, layer):
        return None


def stated(trt, config, limits):
    """(activation bytes, weight bytes) of the plan for mixed steps, from the build log."""
    spec = ModelSpec.from_hf_config(config)
    options = NetworkOptions(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        tokens_per_block=limits.tokens_per_block,
        sms=(89,),
    )
    built = build_network(trt, spec, RandomWeights(spec), Rank(), options, "mixed")
    settings, profile = built.builder.create_builder_config(), built.builder.create_optimization_profile()
    for name, shapes in built.profiles.items():
        profile.set_shape(name, *shapes)
    settings.add_optimization_profile(profile)
    settings.num_compute_capabilities = 1
    assert settings.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert built.builder.build_serialized_network(built.network, settings) is not None
    found = parse_footprint(built.graph.log.lines)
    return found.activation_bytes, found.weights_bytes


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, StepLimits(8, 256, 2048)),  # attention takes most
        ({}, StepLimits(16, 1024, 1024)),  # rows of long prompts beside sequences
        (WIDE_GROUPS, StepLimits(32, 2048, 4096)),
        ({}, StepLimits(2, 4096, 256)),  # the MLP takes most
        (GEMMA2, StepLimits(8, 256, 2048)),  # capped scores are kept
        (MIXTRAL, StepLimits(2, 4096, 256)),  # experts side by side
    ],
)
def test_the_planned_memory_is_the_builders(changes, limits):
    config = LLAMA | changes
    recipe, _ = resolve_recipe("fp16")
    planned = Precision("fp16", recipe, "fp16", "float16")
    (stage,) = pipeline_stages(read_decoder_shape(config), planned, Parallelism())
    activations, weights = stated(load_module("tensorrt-rtx"), config, limits)
    assert 0.97 * activations < activation_bytes(stage, limits) < 1.12 * activations
    assert stage.weight_bytes == pytest.approx(
        weights, rel=0.1
    )  # tables of RoPE and of positions are the builder's own
