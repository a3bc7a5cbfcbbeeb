"""Calibration text to windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. Raises QuantizeError."""
    from tokenizers import Tokenizer

    data = checkpoint.side_files().get("tokenizer.json")
    if data is None:
        raise QuantizeError(f"{checkpoint.path}: no tokenizer.json found; calibration needs it beside the weights")
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises plain Exception
        raise QuantizeError(f"{checkpoint.path}: tokenizer.json is not a tokenizer: {error}") from None


def token_ids(tokenizer: Tokenizer, documents: Sequence[str], vocab_size: int) -> npt.NDArray[np.int64]:
    """All documents one after the other, without special tokens of the tokenizer's own. Raises QuantizeError."""
    encoded = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    ids = np.array([token for document in encoded for token in document.ids], np.int64)
    if ids.size and ids.max() >= vocab_size:
        raise QuantizeError(
            f"the tokenizer gives token {ids.max()}, the model has {vocab_size}; tokenizer and model do not match"
        )
    return ids


def choose_windows(
    ids: npt.NDArray[np.int64], num_samples: int, sequence_length: int, seed: int, source: str
) -> npt.NDArray[np.int64]:
    """[num_samples, sequence_length] windows that do not overlap, in the text's order.

    Raises QuantizeError when the text, which ``source`` names, is too short.
    """
    available = len(ids) // sequence_length
    if available < num_samples:
        raise QuantizeError(
            f"calibration text {source} has {len(ids)} tokens, {num_samples} samples of {sequence_length} need "
            f"{num_samples * sequence_length}; give a longer text, or calibration.num_samples {max(available, 1)} "
            f"and calibration.sequence_length {min(sequence_length, max(len(ids), 2))}"
        )
    chosen = np.sort(np.random.default_rng(seed).choice(available, num_samples, replace=False))
    return ids[: available * sequence_length].reshape(available, sequence_length)[chosen]
