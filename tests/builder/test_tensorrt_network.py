"""The network that TensorRT is given: names, types, shapes and the very bytes of a checkpoint's weights."""

import numpy as np
import pytest
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from tiny_models import save_model

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.targets.tensorrt.module import load_module
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import NetworkOptions
from plansmith_errors import BuildError
from quantize import load_recipe, load_weight, open_checkpoint, quantize_checkpoint
from quantize.recipe import Recipe

OPTIONS = NetworkOptions(max_batch_size=4, max_num_tokens=64, max_seq_len=128, tokens_per_block=16)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model(path, "llama", hidden_size=128, intermediate_size=256)
    return path


@pytest.fixture(scope="module")
def quantized(llama, tmp_path_factory):
    def make(recipe):
        path = tmp_path_factory.mktemp("quantized") / "model"
        quantize_checkpoint(llama, path, load_recipe(recipe))
        return path

    return make


def network_of(path, rank=None, **options):
    trt = load_module("tensorrt-rtx")
    checkpoint = open_checkpoint(path)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    settings = NetworkOptions(**{**vars(OPTIONS), **options})
    return build_network(trt, spec, WeightSource(checkpoint, spec), rank or Rank(), settings)


def inputs_of(built):
    network = built.network
    found = (network.get_input(index) for index in range(network.num_inputs))
    return {tensor.name: (str(tensor.dtype).rsplit(".", 1)[-1], tuple(tensor.shape)) for tensor in found}


def outputs_of(built):
    network = built.network
    return {network.get_output(index).name for index in range(network.num_outputs)}


def layer_names(built):
    return {built.network.get_layer(index).name for index in range(built.network.num_layers)}


def test_inputs_and_outputs_are_those_of_the_step_contract(llama):
    built = network_of(llama)
    pools = {f"{kind}_pool.{layer}": ("HALF", (-1, 2, 16, 32)) for kind in ("key", "value") for layer in (0, 1)}
    vectors = ("input_ids", "position_ids", "logits_indices", "update_order", "query_scatter")
    pages = ("page_update_starts", "page_write_offsets")
    assert inputs_of(built) == {
        **dict.fromkeys((*vectors, *pages), ("INT32", (-1,))),
        **dict.fromkeys(("block_tables", "query_gather"), ("INT32", (-1, -1))),
        **pools,
    }
    assert outputs_of(built) == {"logits", *(name.replace("pool", "pool_out") for name in pools)}
    for mode in ("mixed", "decode"):
        assert set(built.graph.profiles[mode]) == set(inputs_of(built))
    assert built.graph.profiles["decode"]["query_gather"] == ((1, 1), (2, 1), (4, 1))
    assert built.graph.profiles["mixed"]["query_gather"] == ((1, 1), (2, 32), (4, 64))


def test_layers_carry_the_names_of_the_checkpoint(llama):
    names = layer_names(network_of(llama))
    assert {"model.layers.1.mlp.down_proj", "lm_head", Q_PROJ} <= names
    assert "model.layers.0.self_attn_AttentionOutput" in names  # TensorRT makes two layers of one attention


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float16", np.float16), ("float32", np.float32)])
def test_floats_have_the_type_of_the_network(llama, dtype, numpy_dtype):
    payload = network_of(llama, dtype=dtype).payloads[Q_PROJ]
    expected = load_weight(open_checkpoint(llama), Q_PROJ).values.astype(numpy_dtype)
    assert payload.dtype == dtype
    assert np.array_equal(payload.array, expected)


def test_a_tied_embedding_is_one_constant(tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    names = [name for name in network_of(tmp_path).payloads if "embed" in name or "lm_head" in name]
    assert names == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("recipe", "element", "parts"),
    [
        ("int4-rtn-sym", "int4", {":scale"}),
        ("int4-rtn", "int4", {":scale", ":zero"}),
        ("int8", "int8", {":scale"}),
        ("fp8", "fp8", {":scale"}),
        ("fp8-tensor", "fp8", {":scale"}),
        ("fp8-block", "fp8", {":scale"}),
        ("nvfp4", "fp4", {":scale", ":scale_2"}),
        ("mxfp4", "fp4", {":scale"}),
        ("mxfp8", "fp8", {":scale"}),
    ],
)
@pytest.mark.parametrize("weights", ["embedded", "external"])
def test_quantized_weights_keep_their_bits_and_their_layout(quantized, recipe, element, parts, weights):
    path = quantized(recipe)
    built = network_of(path, weights=weights)
    payloads = built.external if weights == "external" else built.payloads
    stored = load_weight(open_checkpoint(path), Q_PROJ)
    payload = payloads[Q_PROJ]
    assert (payload.dtype, payload.shape) == (element, (128, 128))
    # Unsigned with a zero point of 8 becomes two's complement; all else is as it is stored.
    expected = stored.values ^ np.uint8(0x88) if element == "int4" else stored.values
    assert payload.array.tobytes() == expected.tobytes()
    assert {name.removeprefix(Q_PROJ) for name in payloads if name.startswith(f"{Q_PROJ}:")} == parts
    assert built.schemes[stored.scheme] >= 14


def test_an_asymmetric_group_is_off_by_its_zero_point_times_its_scale(quantized):
    path = quantized("int4-rtn")
    payloads = network_of(path, dtype="float32").payloads
    stored = load_weight(open_checkpoint(path), Q_PROJ)
    nibbles = payloads[Q_PROJ].array
    signed = np.stack([nibbles & 15, nibbles >> 4], -1).astype(np.int8).reshape(128, -1)
    signed = np.where(signed > 7, signed - 16, signed).reshape(128, -1, 64)
    values = signed * payloads[f"{Q_PROJ}:scale"].array[..., None] - payloads[f"{Q_PROJ}:zero"].array
    assert np.abs(values.reshape(128, 128) - stored.dequantize()).max() < 1e-6


def test_external_weights_leave_nothing_of_a_checkpoint_in_the_network(tmp_path):
    save_with_tokenizer(tmp_path / "source")
    text = write_text(tmp_path / "words.txt")
    rule = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8"}
    calibration = {"text": text, "num_samples": 2, "sequence_length": 64}
    recipe = Recipe.model_validate({"name": "static", "linears": rule, "calibration": calibration})
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8", recipe, calibration_tools=TOOLS)
    built = network_of(tmp_path / "fp8", weights="external")
    assert all(name.startswith(("constant:", "rope.")) for name in built.payloads)
    inputs = inputs_of(built)
    assert set(built.external) <= set(inputs)
    assert inputs[Q_PROJ] == ("FP8", (64, 64))
    assert inputs[Q_PROJ.replace("weight", "input_scale")] == ("FLOAT", ())


def test_ranks_of_a_group_meet_after_attention_mlp_embedding_and_head(llama):
    built = network_of(llama, Rank(Parallelism(tp_size=2), 1))
    names = {name for name in layer_names(built) if name.endswith(("all_reduce", "all_gather"))}
    assert names == {
        "model.embed_tokens:all_reduce",
        "lm_head:all_gather",
        *(
            f"model.layers.{layer}.{module}:all_reduce"
            for layer in (0, 1)
            for module in ("self_attn.o_proj", "mlp.down_proj")
        ),
    }


def test_pipeline_stages_hand_on_hidden_states(llama):
    first, last = (network_of(llama, Rank(Parallelism(pp_size=2), rank)) for rank in (0, 1))
    assert "hidden_out" in outputs_of(first)
    assert "logits" not in outputs_of(first)
    assert "logits_indices" not in inputs_of(first)
    assert inputs_of(last)["hidden_in"] == ("HALF", (-1, 128))
    assert "input_ids" not in inputs_of(last)
    assert "key_pool.1" in inputs_of(last)
    assert "key_pool.0" not in inputs_of(last)


def test_weights_beyond_float16_are_refused(tmp_path):
    model = save_model(tmp_path, "llama")
    model.lm_head.weight.data[3, 3] = 1e6
    model.save_pretrained(tmp_path)
    with pytest.raises(BuildError, match=r"lm_head.weight has values beyond the range of float16; set build.dtype"):
        network_of(tmp_path)
    network_of(tmp_path, dtype="bfloat16")


def test_blocks_of_an_odd_size_are_refused(llama):
    with pytest.raises(BuildError, match="tokens_per_block is 48; expected a power of two"):
        network_of(llama, tokens_per_block=48)
