"""Tries the tokenizer files of a checkpoint before they are packaged: a server is a poor place to find them broken."""

from __future__ import annotations

import logging
from pathlib import Path

from plansmith_errors import EngineError, RepositoryError, RequestError
from triton_repo.backend.tokenization import PromptTokenizer, read_json_object
from triton_repo.chat_template import check_chat_template

logger = logging.getLogger(__name__)


def check_tokenizer(directory: Path) -> None:
    """Raises RepositoryError when a file cannot be used; warns of a chat template that does not compile."""
    try:
        tokenizer = PromptTokenizer(directory)
        config = read_json_object(directory / "config.json")
    except EngineError as error:
        raise RepositoryError(str(error)) from None
    _check_eos(tokenizer.eos_token_ids, config.get("vocab_size"), directory)
    try:
        check_chat_template(directory)
    except RequestError as error:
        # Plain prompts need no template, so the model is of use all the same.
        logger.warning("%s: %s; chats with this model will be refused", directory, error)


def _check_eos(eos_token_ids: tuple[int, ...], vocab_size: object, directory: Path) -> None:
    if not isinstance(vocab_size, int):
        return
    outside = [token_id for token_id in eos_token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise RepositoryError(
            f"{directory}: eos_token_id {outside[0]} is not one of the {vocab_size} tokens; correct the model's config"
        )
