"""A GGUF file reads as the Hugging Face checkpoint it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import HEAD_DIM, tiny_weights, write_gguf, write_safetensors
from tokenizers import Tokenizer

import quantize
from plansmith_errors import CheckpointError, PlansmithError
from quantize.gguf_config import llama3_divisors


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_same_weights_as_safetensors(tmp_path: Path, architecture: str) -> None:
    weights = tiny_weights(architecture, tied=False)
    ours = quantize.open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, architecture))
    theirs = quantize.open_checkpoint(write_safetensors(tmp_path / "hf", weights))
    assert sorted(ours.names()) == sorted(theirs.names())
    for tensor in ours:
        np.testing.assert_array_equal(ours.load(tensor.name), theirs.load(tensor.name))
    assert ours.config["model_type"] == architecture
    assert ours.config["num_key_value_heads"] == 2 and ours.config["rms_norm_eps"] == 1e-5
    assert not ours.is_tied
    assert ours.origin == "F32 (GGUF)"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_quantized_types_keep_rows_in_place(tmp_path: Path, kind: str) -> None:
    """Rows are un-permuted before they are dequantized, so a wrong order would mix the heads."""
    weights = tiny_weights()
    ggml_type = gguf.GGMLQuantizationType[kind]
    checkpoint = quantize.open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, quantization=ggml_type))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], ggml_type), ggml_type)
        np.testing.assert_array_equal(checkpoint.load(name), expected)
        np.testing.assert_array_equal(checkpoint.load_rows(name, 3, 7), expected[3:7])
    assert kind in checkpoint.origin


READABLE = sorted(kind.name for kind in gguf.quants._type_traits if kind.name not in ("BF16",))


@pytest.mark.parametrize("kind", READABLE)
def test_every_type_that_gguf_can_dequantize_is_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gguf writes few of these types, so the blocks are random bytes; K-quants have blocks of 256 columns."""
    for name, size in {"HIDDEN": 256, "FFN": 256, "HEADS": 4, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(tiny_checkpoints, name, size)
    ggml_type = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
    stored: list[np.ndarray] = []

    def random_blocks(weight: np.ndarray, _: object) -> np.ndarray:
        shape = (weight.shape[0], weight.shape[1] // block * nbytes)
        stored.append(np.random.default_rng(len(stored)).integers(0, 256, shape).astype(np.uint8))
        return stored[-1]

    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    weights = tiny_checkpoints.tiny_weights("qwen2")
    path = tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, "qwen2", quantization=ggml_type)
    checkpoint = quantize.open_checkpoint(path)
    matrices = [name for name, weight in weights.items() if weight.ndim == 2]
    with np.errstate(all="ignore"):  # random scales are infinite here and there
        for name, blocks in zip(matrices, stored, strict=True):
            expected = gguf.quants.dequantize(blocks, ggml_type)
            np.testing.assert_array_equal(checkpoint.load(name), expected)
            np.testing.assert_array_equal(checkpoint.load_rows(name, 5, 9), expected[5:9])


def test_head_equal_to_embeddings_is_tied(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    checkpoint = quantize.open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    assert checkpoint.is_tied and "lm_head.weight" not in checkpoint


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    checkpoint = quantize.open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_weights()))
    tokenizer = Tokenizer.from_str(checkpoint.side_files()["tokenizer.json"].decode())
    encoding = tokenizer.encode("HELL HE<|end|>")
    assert encoding.tokens == ["HELL", "Ġ", "HE", "<|end|>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "HELL HE"
    assert checkpoint.chat_template == "{{ messages[0]['content'] }}"
    config = json.loads(checkpoint.side_files()["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|end|>")


def test_every_end_of_turn_token_is_an_eos(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), metadata={"tokenizer.ggml.eot_token_id": 5})
    generation = json.loads(quantize.open_checkpoint(path).side_files()["generation_config.json"])
    assert generation["eos_token_id"] == [tokens_index("<|end|>"), 5]


def tokens_index(token: str) -> int:
    from tiny_checkpoints import byte_level_vocabulary

    return byte_level_vocabulary()[0].index(token)


def test_rope_scaling_is_converted(tmp_path: Path) -> None:
    def scaling(metadata: dict[str, object], tensors: dict[str, np.ndarray] | None = None) -> object:
        path = write_gguf(tmp_path / "m.gguf", tiny_weights(), metadata=metadata, extra_tensors=tensors)
        return quantize.open_checkpoint(path).config["rope_scaling"]

    key = "llama.rope.scaling."
    assert scaling({}) is None
    assert scaling({key + "type": "linear", key + "factor": 4.0}) == {"rope_type": "linear", "factor": 4.0}
    yarn = scaling({key + "type": "yarn", key + "factor": 2.0, key + "original_context_length": 64})
    assert yarn == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    table = llama3_divisors(HEAD_DIM, 10000.0, 32.0, 8192).astype(np.float32)
    llama3 = scaling({}, {"rope_freqs.weight": table})
    assert llama3 == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama3_table_is_that_of_transformers() -> None:
    """The divisors that identify a table, against the rope initialisation of transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        rope_theta=500000.0,
        rope_parameters=scaling,
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / scaled.numpy(), llama3_divisors(128, 500000.0, 8.0, 8192), rtol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "supported: none, linear, yarn"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "changes the model's numbers"),
        ({"llama.attention.sliding_window": 4096}, "changes the model's numbers"),
        ({"llama.rope.dimension_count": 8}, "expected head_dim, which is 16"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0}, "with the type yarn alone"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "expected a positive number"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"llama.attention.key_length": 32}, "the metadata says"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(tmp_path: Path, metadata: dict[str, object], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        quantize.open_checkpoint(path)


def test_rope_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2).astype(np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), extra_tensors=tensors)
    with pytest.raises(CheckpointError, match="not a table of Llama 3"):
        quantize.open_checkpoint(path)


def test_other_architectures_are_refused_with_the_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), "gemma")
    with pytest.raises(CheckpointError, match="'gemma' is not supported; supported: llama, qwen2"):
        quantize.open_checkpoint(path)


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    experts = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps.weight' belongs to a mixture of experts"):
        quantize.open_checkpoint(write_gguf(tmp_path / "a.gguf", weights, extra_tensors=experts))
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight' is missing"):
        quantize.open_checkpoint(write_gguf(tmp_path / "b.gguf", weights))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(CheckpointError, match="a GGUF file begins with"):
        quantize.open_checkpoint(path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_weights()).read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_at_any_length(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(gguf_bytes) - 64))  # the last bytes may be padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes[:length])
    with pytest.raises(CheckpointError, match=r"truncated|begins with"):
        quantize.open_checkpoint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tampered_header_never_escapes_our_errors(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, 4000))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    try:
        checkpoint = quantize.open_checkpoint(path)
        checkpoint.side_files()
        checkpoint.load("model.layers.0.self_attn.q_proj.weight")
    except PlansmithError as error:
        assert "\n" not in str(error)
