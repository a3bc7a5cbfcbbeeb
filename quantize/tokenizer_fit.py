"""Whether the tokenizer beside the weights can be theirs: every token needs its row of the embedding matrix."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, parse_json_object
from quantize.model_shape import EMBEDDINGS

log = logging.getLogger(__name__)

_FILE = "tokenizer.json"


def check_tokenizer_fits(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when the vocabulary has more tokens than the model; warns of added ones.

    A tokenizer with fewer tokens is usual, since embedding matrices are padded. Without tokenizer.json nothing is said.
    """
    data = checkpoint.side_files().get(_FILE)
    if data is None:
        return
    source = f"{checkpoint.path}: {_FILE}"
    content = parse_json_object(data, source)
    num_rows = checkpoint.info(EMBEDDINGS).shape[0]
    model = content.get("model")
    largest = max(_ids(model.get("vocab") if isinstance(model, dict) else None), default=0)
    if largest >= num_rows:
        raise CheckpointError(
            f"{source} has token {largest}, the model has {num_rows} tokens; "
            "tokenizer and model do not match, get both from the same place"
        )
    outside = [token for token in _added(content.get("added_tokens")) if token >= num_rows]
    if outside:
        log.warning(
            "%s adds token %d, the model has %d tokens: text with it cannot be run", source, outside[0], num_rows
        )


def _ids(vocabulary: Any) -> Iterable[int]:
    """BPE, WordPiece and WordLevel map pieces to ids; a Unigram model lists its pieces in their order."""
    if isinstance(vocabulary, list):
        return [len(vocabulary) - 1]
    return [token for token in vocabulary.values() if type(token) is int] if isinstance(vocabulary, dict) else []


def _added(tokens: Any) -> list[int]:
    entries = [entry.get("id") for entry in tokens if isinstance(entry, dict)] if isinstance(tokens, list) else []
    return [token for token in entries if type(token) is int]
