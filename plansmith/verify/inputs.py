"""What is measured on: token ids of a text and questions, read and checked before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder import Question
from plansmith.config import PerplexityCheck, VerifySection
from plansmith.verify.questions import read_questions, read_utf8
from plansmith_errors import CheckpointError, ConfigError
from quantize import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """Empty lists where the section asks for no such measurement."""

    token_ids: list[int]
    questions: list[Question]
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def read_inputs(section: VerifySection, tokenizer: Tokenizer) -> Inputs:
    """Raises ConfigError for a missing, broken or too short file."""
    text, choices = section.perplexity, section.choices
    ids = tokenize_text(tokenizer, read_text(text), text) if text is not None else []
    return Inputs(ids, read_questions(choices) if choices is not None else [], tokenizer)


def load_tokenizer(source: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. Raises CheckpointError."""
    from tokenizers import Tokenizer

    data = source.side_files().get("tokenizer.json")
    if data is None:
        raise CheckpointError(f"{source.path}: no tokenizer.json found; expected it beside the weights")
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{source.path}: tokenizer.json is not a tokenizer: {error}") from None


def read_text(check: PerplexityCheck) -> str:
    """The text to measure perplexity on. Raises ConfigError."""
    return read_utf8(check.text, "verify.perplexity.text")


def tokenize_text(tokenizer: Tokenizer, text: str, check: PerplexityCheck) -> list[int]:
    """Token ids of the text, without special tokens. Raises ConfigError when they do not fill one window."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < check.window:
        raise ConfigError(
            f"verify.perplexity.text: {check.text} has {len(ids)} tokens, one window needs {check.window}; "
            "give a longer text or a smaller window"
        )
    return ids
