"""Refuses in a moment what a late stage of the pipeline would refuse after all the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import builder
from plansmith.config import BuildFile, PerplexityCheck
from plansmith_errors import CheckpointError, ConfigError
from quantize import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_source(source: Checkpoint, build_file: BuildFile) -> None:
    """Raises PlansmithError when the model, its tokenizer, the limits or the text to measure cannot work."""
    build_file.build.resolved_max_seq_len(builder.ModelSpec.from_hf_config(source.config))
    tokenizer = load_tokenizer(source)
    check = build_file.verify.perplexity
    if check is not None:
        # A beginning is enough for any tokenizer, and quick for a long text.
        tokenize_text(tokenizer, read_text(check)[: check.window * 64], check)


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
    try:
        return check.text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"verify.perplexity.text: {check.text} is not UTF-8; expected a plain text") from None
    except OSError as error:
        raise ConfigError(f"verify.perplexity.text: {check.text}: {error.strerror}; name a plain text") from None


def tokenize_text(tokenizer: Tokenizer, text: str, check: PerplexityCheck) -> list[int]:
    """Token ids of the text, without special tokens. Raises ConfigError when they do not fill one window."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < check.window:
        raise ConfigError(
            f"verify.perplexity.text: {check.text} has {len(ids)} tokens, one window needs {check.window}; "
            "give a longer text or a smaller window"
        )
    return ids
