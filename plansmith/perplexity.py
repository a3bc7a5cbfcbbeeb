"""Perplexity of a compiled engine on a text: what is measured is what is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import builder
from plansmith.config import PerplexityCheck
from plansmith_errors import ConfigError
from quantize import Checkpoint


def read_text(path: Path) -> str:
    """Read a UTF-8 text. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"verify.perplexity.text: {path} cannot be read as UTF-8 text: {error}") from None


def measure_perplexity(engine_dir: Path, checkpoint: Checkpoint, text: str, check: PerplexityCheck) -> dict[str, Any]:
    """Load the engine and score the text in windows, tokenized by the checkpoint's tokenizer without special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(checkpoint.side_files()["tokenizer.json"].decode())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < check.window:
        raise ConfigError(
            f"verify.perplexity.text: {check.text} has {len(ids)} tokens, one window needs {check.window}; "
            "give a longer text or a smaller window"
        )
    engine = builder.load_engine(engine_dir)
    try:
        measured = builder.perplexity(engine, ids, window=check.window, max_windows=check.max_windows)
    finally:
        engine.close()
    return {"perplexity": measured.perplexity, "num_scored": measured.num_scored}
