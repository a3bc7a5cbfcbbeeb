"""A tokenizer of another model is noticed before the model is quantized, not when it is served."""

import json

import pytest
from tiny_checkpoints import VOCAB, tiny_weights, write_safetensors

from plansmith_errors import CheckpointError
from quantize import load_recipe, quantize_checkpoint


def quantize_with(tmp_path, **tokenizer):
    source = write_safetensors(tmp_path / "model", tiny_weights(), tokenizer__json=json.dumps(tokenizer))
    quantize_checkpoint(source, tmp_path / "out", load_recipe("int8"))


def vocabulary(size):
    return {f"w{token}": token for token in range(size)}


@pytest.mark.parametrize(
    "model",
    [{"type": "BPE", "vocab": vocabulary(VOCAB + 1)}, {"type": "Unigram", "vocab": [["a", -1.0]] * (VOCAB + 1)}],
    ids=lambda model: model["type"],
)
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match=rf"has token {VOCAB}, the model has {VOCAB} tokens"):
        quantize_with(tmp_path, model=model)
    assert not (tmp_path / "out").exists()


def test_a_padded_embedding_matrix_is_usual(tmp_path):
    quantize_with(tmp_path, model={"type": "WordLevel", "vocab": vocabulary(VOCAB - 7)})


def test_added_tokens_without_a_row_are_warned_of(tmp_path, caplog):
    quantize_with(
        tmp_path, model={"type": "BPE", "vocab": vocabulary(VOCAB)}, added_tokens=[{"id": VOCAB, "content": "<pad>"}]
    )
    assert f"adds token {VOCAB}" in caplog.text


def test_a_tokenizer_that_is_no_json_is_one_clear_line(tmp_path):
    source = write_safetensors(tmp_path / "model", tiny_weights(), tokenizer__json="{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        quantize_checkpoint(source, tmp_path / "out", load_recipe("int8"))
