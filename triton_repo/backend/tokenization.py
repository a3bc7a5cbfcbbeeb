"""Prompts to token ids, with the tokenizer files that lie in the model repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plansmith_errors import EngineError, RequestError


class PromptTokenizer:
    """``tokenizer.json`` of a directory, and the ids that end a text."""

    def __init__(self, directory: Path) -> None:
        """Raises EngineError when a file is missing or damaged."""
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise EngineError(f"{path}: no such file; package the checkpoint again")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise EngineError(f"{path}: not a tokenizer: {error}") from None
        self.eos_token_ids = read_eos_token_ids(directory)
        self._bos_token_id = self._read_bos_token_id(directory)

    @property
    def longest_token_bytes(self) -> int:
        """A bound on the UTF-8 bytes that one token stands for.

        A byte-level vocabulary spells each byte as one character; the others spell text as it is.
        """
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt with the tokenizer's special tokens; a BOS that the text already has is not doubled."""
        try:
            ids: list[int] = self.tokenizer.encode(text).ids
        except Exception as error:
            raise RequestError(f"the prompt cannot be tokenized: {error}") from None
        if self._bos_token_id is not None and ids[:2] == [self._bos_token_id] * 2:
            return ids[1:]
        return ids

    def token_text(self, token_id: int) -> str:
        """The text of one token, for log probabilities; bytes that are no character become U+FFFD."""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _read_bos_token_id(self, directory: Path) -> int | None:
        token = read_json_object(directory / "tokenizer_config.json").get("bos_token")
        content = token.get("content") if isinstance(token, dict) else token
        token_id: int | None = self.tokenizer.token_to_id(content) if isinstance(content, str) else None
        return token_id


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """``eos_token_id`` of generation_config.json, else of config.json; empty when neither names one."""
    for name in ("generation_config.json", "config.json"):
        found = read_json_object(directory / name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found and all(isinstance(token_id, int) for token_id in found):
            return tuple(found)
    return ()


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file. Raises EngineError when it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
