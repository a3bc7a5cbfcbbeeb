"""The tokenizer inside a GGUF file into tokenizer.json and tokenizer_config.json.

The ids are those of llama.cpp for the same text (src/llama-vocab.cpp is the reference for what each ``pre`` means).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plansmith_errors import CheckpointError
from quantize.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Each expression splits the pieces that the one before it left.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2 + r"|\s+",),
    "smollm": (r"\p{N}", _GPT2 + r"|\s+"),
    "qwen2": (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,),
    "llama-bpe": (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens, and what llama.cpp does around them."""

    file: GgufFile
    model: str
    pre: str
    tokens: list[str]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def special(self, name: str) -> str | None:
        """The token that the metadata calls the ``name`` token, if there is one."""
        index = self.file.get(f"tokenizer.ggml.{name}_token_id", int)
        return self.tokens[index] if index is not None and 0 <= index < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.get(f"tokenizer.ggml.{name}", bool)
        return default if value is None else value

    @property
    def architecture(self) -> str:
        return self.file.require("general.architecture", str)

    @property
    def adds_bos(self) -> bool:
        return self.flag("add_bos_token", self.model == "llama" or self.pre == "llama-bpe")

    @property
    def adds_eos(self) -> bool:
        return self.flag("add_eos_token", False)


def convert_tokenizer(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. Raises CheckpointError for a tokenizer that cannot be converted."""
    vocabulary = _read_vocabulary(file)
    tokenizer = _build_bpe(vocabulary) if vocabulary.model == "gpt2" else _build_spm(vocabulary)
    tokenizer.post_processor = _post_processor(vocabulary)
    _check_ids(vocabulary, tokenizer)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _tokenizer_config(vocabulary),
    }


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    model = file.require("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {model!r}; supported: gpt2 (BPE), llama (SentencePiece)"
        )
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    pre = _ALIASES.get(pre, pre)
    if model == "gpt2" and pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join([*_SPLITS, *_ALIASES])}"
        )
    tokens = _list_of(file, "tokenizer.ggml.tokens", str)
    types = _list_of(file, "tokenizer.ggml.token_type", int, default=[_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: a token occurs twice in tokenizer.ggml.tokens")
    return _Vocabulary(file, model, pre, tokens, types)


def _build_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in _list_of(vocabulary.file, "tokenizer.ggml.merges", str)]
    ids = vocabulary.ids
    for merge in merges:
        if len(merge) != 2 or not {merge[0], merge[1], merge[0] + merge[1]} <= ids.keys():
            raise CheckpointError(
                f"{vocabulary.file.path}: the merge {' '.join(merge)!r} is not of tokens of the vocabulary"
            )
    # Unused entries only pad the embedding matrix; no text may produce them.
    used = {token: index for token, index in ids.items() if vocabulary.types[index] != _UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=used, merges=merges, ignore_merges=vocabulary.pre == "llama-bpe"))
    if vocabulary.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[vocabulary.pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *splits,
            pre_tokenizers.ByteLevel(add_prefix_space=vocabulary.flag("add_space_prefix", False), use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary, (_CONTROL,))
    return tokenizer


def _build_spm(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if vocabulary.flag("remove_extra_whitespaces", False):
        raise CheckpointError(f"{vocabulary.file.path}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    unknown = vocabulary.special("unknown") or "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids, merges=_spm_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    has_prefix = vocabulary.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_tokens(tokenizer, vocabulary, (_UNKNOWN, _CONTROL))
    return tokenizer


def _spm_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the best score: the scores order the merges of a BPE."""
    scores = _list_of(vocabulary.file, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{vocabulary.file.path}: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    pieces = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.types[index] == _NORMAL}
    ranked = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, special_types: tuple[int, ...]) -> None:
    """Tokens that are found in the text before it is split. In id order, so that new ones would keep their ids."""
    from tokenizers import AddedToken

    added: list[AddedToken] = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in special_types or kind == _USER_DEFINED:
            added.append(AddedToken(token, special=kind != _USER_DEFINED, normalized=False))
    tokenizer.add_tokens(added)


def _post_processor(vocabulary: _Vocabulary) -> Any:
    from tokenizers import processors

    bos = vocabulary.special("bos") if vocabulary.adds_bos else None
    eos = vocabulary.special("eos") if vocabulary.adds_eos else None
    ids = vocabulary.ids
    specials = [(token, ids[token]) for token in dict.fromkeys((bos, eos)) if token is not None]
    one = [part for part in (bos, "$A", eos) if part is not None]
    two = [part for part in (bos, "$B:1", eos) if part is not None]
    return processors.TemplateProcessing(single=one, pair=[*one, *two], special_tokens=specials)


def _check_ids(vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    for index, token in enumerate(vocabulary.tokens):
        if vocabulary.types[index] != _UNUSED and tokenizer.token_to_id(token) != index:
            raise CheckpointError(
                f"{vocabulary.file.path}: token {token!r} (id {index}) cannot keep its id in tokenizer.json"
            )


def _tokenizer_config(vocabulary: _Vocabulary) -> bytes:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": vocabulary.file.get(f"{vocabulary.architecture}.context_length", int),
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        **{f"{ours}_token": vocabulary.special(theirs) for ours, theirs in names.items()},
        "chat_template": vocabulary.file.get("tokenizer.chat_template", str),
    }
    known = {key: value for key, value in config.items() if value is not None}
    return (json.dumps(known, indent=2, ensure_ascii=False) + "\n").encode()


def _list_of(file: GgufFile, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    values = file.get(key, list)
    if values is None:
        values = file.require(key, list) if default is None else default
    if values and not isinstance(values[0], kind):
        raise CheckpointError(f"{file.path}: {key} holds {type(values[0]).__name__} values, expected {kind.__name__}")
    return values
