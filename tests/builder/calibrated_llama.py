"""A tiny random model with a tokenizer and a text, as calibration needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import VOCAB_SIZE, random_ids, save_model
from tokenizers import Tokenizer, models, pre_tokenizers

import builder
import quantize
from quantize.recipe import Recipe

TOOLS = quantize.CalibrationTools(builder.calibration_runner)


def save_with_tokenizer(path: Path, family: str = "llama", **settings: Any) -> Any:
    """A model of hidden size 64 whose words are w0, w1, ..."""
    model = save_model(path, family, **settings)
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def write_text(path: Path, num_tokens: int = 2000) -> Path:
    """Random words, some of them a lot more often than others."""
    ids = np.minimum(random_ids(1, num_tokens, seed=5)[0], random_ids(1, num_tokens, seed=6)[0])
    path.write_text(" ".join(f"w{token}" for token in ids))
    return path


def calibrated(method: str, text: Path, linears: dict[str, Any] | None = None, **calibration: Any) -> Recipe:
    rule = {"scheme": "int4", "group_size": 32, "method": method, **(linears or {})}
    settings = {"text": text, "num_samples": 16, "sequence_length": 64, **calibration}
    return Recipe.model_validate({"name": "test", "linears": rule, "calibration": settings})
