"""The tokenizer of a GGUF file: each kind splits text as llama.cpp does, and every token keeps its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from plansmith_errors import CheckpointError
from quantize.gguf_file import GgufFile
from quantize.gguf_tokenizer import convert_tokenizer

BYTES = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]


def write_vocabulary(path: Path, model: str, tokens: list[str], types: list[int], **values: Any) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def tokenizer_of(file: GgufFile) -> Tokenizer:
    return Tokenizer.from_str(convert_tokenizer(file)["tokenizer.json"].decode())


def bpe(path: Path, pre: str, merges: list[str], **values: Any) -> Tokenizer:
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<s>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    file = write_vocabulary(
        path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, bos_token_id=len(tokens) - 2, **values
    )
    return tokenizer_of(file)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġ", "a", "b"]),  # digits stand alone
        ("qwen2", ["1", "2", "3", "4", "Ġ", "a", "b"]),
        ("llama-bpe", ["123", "4", "Ġ", "a", "b"]),  # up to three digits
        ("llama3", ["123", "4", "Ġ", "a", "b"]),
        ("default", ["123", "4", "Ġ", "a", "b"]),
        ("gpt-2", ["1234", "Ġ", "a", "b"]),  # any number of digits
    ],
)
def test_numbers_are_split_as_each_family_does(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer = bpe(tmp_path / "v.gguf", pre, ["1 2", "12 3", "123 4"])
    encoding = tokenizer.encode("1234 ab", add_special_tokens=False)
    assert encoding.tokens == expected
    assert tokenizer.decode(encoding.ids) == "1234 ab"


def test_bos_is_added_where_the_family_does(tmp_path: Path) -> None:
    assert bpe(tmp_path / "a.gguf", "llama-bpe", ["x y"]).encode("a").tokens == ["<s>", "a"]
    assert bpe(tmp_path / "b.gguf", "llama-bpe", ["x y"], add_bos_token=False).encode("a").tokens == ["a"]
    assert bpe(tmp_path / "c.gguf", "qwen2", ["x y"]).encode("a").tokens == ["a"]


def test_special_tokens_are_found_in_the_text(tmp_path: Path) -> None:
    tokenizer = bpe(tmp_path / "v.gguf", "smollm", ["x y"])
    encoding = tokenizer.encode("a<s>b<tool>", add_special_tokens=False)
    assert encoding.tokens == ["a", "<s>", "b", "<tool>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "ab<tool>", "a user's own token is text"


SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁he",
    "▁h",
    "▁",
    "h",
    "e",
    "l",
    "ll",
    "o",
    "llo",
]
SPM_TYPES = [2, 3, 3, *[6] * 256, *[1] * 9]
SPM_SCORES = [0.0] * 259 + [-1.0, -2.0, -5.0, -5.0, -5.0, -5.0, -0.5, -5.0, -3.0]


def spm(path: Path, **values: Any) -> Tokenizer:
    ids = {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return tokenizer_of(
        write_vocabulary(path, "llama", SPM_TOKENS, SPM_TYPES, token_scores=SPM_SCORES, **ids, **values)
    )


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path / "v.gguf")
    encoding = tokenizer.encode("hello é")
    assert encoding.tokens == ["<s>", "▁he", "llo", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "hello é"


def test_sentencepiece_without_the_leading_space(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path / "v.gguf", add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("hello").tokens == ["h", "e", "llo"]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("bert", {}, "is 'bert'; supported: gpt2"),
        ("gpt2", {"tokenizer_pre": "tekken", "token_merges": []}, "is 'tekken'; supported: default"),
        ("gpt2", {"tokenizer_pre": "smollm", "token_merges": ["a zz"]}, "merge 'a zz' is not of tokens"),
        ("gpt2", {"tokenizer_pre": "smollm"}, r"tokenizer.ggml.merges' is missing"),
        ("llama", {}, r"tokenizer.ggml.scores' is missing"),
        ("llama", {"token_scores": [0.0]}, "2 tokens but 1 scores"),
        ("llama", {"token_scores": [0.0, 0.0], "remove_extra_whitespaces": True}, "is not supported"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, model: str, values: dict[str, Any], message: str) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", model, ["a", "b"], [1, 1], **values)
    with pytest.raises(CheckpointError, match=message):
        convert_tokenizer(file)


def test_a_token_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", "gpt2", ["a", "a"], [1, 1], tokenizer_pre="smollm", token_merges=[])
    with pytest.raises(CheckpointError, match="occurs twice"):
        convert_tokenizer(file)
