"""One request on its way through the scheduler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plansmith_errors import RequestError
from plugins.generation import GenerationRequest, SamplingParams, TokenLogprob
from plugins.inflight_batching.detokenizer import TextStream
from plugins.inflight_batching.step import EngineLimits


class Sequence:
    """A request, its tokens and its text. Numbers that change in every step live in the scheduler's arrays instead."""

    __slots__ = (
        "max_tokens",
        "num_prompt_tokens",
        "output_ids",
        "request_id",
        "sampling",
        "seed",
        "slot",
        "text",
        "tokens",
        "unsent_ids",
        "unsent_logprobs",
    )

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: npt.NDArray[np.int64],
        max_tokens: int,
        seed: int,
        text: TextStream,
    ) -> None:
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.tokens = prompt_ids  # [n] to be computed as prompt: the prompt, and after a preemption the outputs too
        self.num_prompt_tokens = len(prompt_ids)
        self.max_tokens = max_tokens
        self.seed = seed
        self.text = text
        self.slot = -1  # while it waits
        self.output_ids: list[int] = []
        self.unsent_ids: list[int] = []  # tokens whose text was held back
        self.unsent_logprobs: list[TokenLogprob] = []

    def fold_outputs(self) -> None:
        """Make prompt and outputs one prompt, for a preempted sequence computes both again."""
        outputs = np.asarray(self.output_ids, dtype=np.int64)
        self.tokens = np.concatenate([self.tokens[: self.num_prompt_tokens], outputs])


def check_request(request: GenerationRequest, limits: EngineLimits) -> tuple[npt.NDArray[np.int64], int]:
    """Prompt ids int64 [n], and max_tokens cut to what max_seq_len leaves. Raises RequestError if it can never run."""
    prompt = _prompt_array(request, limits.vocab_size)
    room = limits.max_seq_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens: this engine takes at most {limits.max_seq_len - 1} "
            f"(max_seq_len {limits.max_seq_len}, prompt and continuation together); shorten the prompt"
        )
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.sampling.max_tokens}: allowed is an integer of at least 1")
    max_tokens = min(request.sampling.max_tokens, room)
    # The last token is sent and never computed on, so it needs no place in the cache.
    pool_tokens = limits.num_blocks * limits.tokens_per_block
    if len(prompt) + max_tokens - 1 > pool_tokens:
        raise RequestError(
            f"prompt and max_tokens make {len(prompt)} + {max_tokens} tokens: the KV cache holds {pool_tokens} "
            f"({limits.num_blocks} blocks of {limits.tokens_per_block}); lower max_tokens or shorten the prompt"
        )
    return prompt, max_tokens


def _prompt_array(request: GenerationRequest, vocab_size: int) -> npt.NDArray[np.int64]:
    if len(request.prompt_ids) == 0:
        raise RequestError("the prompt is empty: expected at least one token")
    try:
        prompt = np.asarray(request.prompt_ids)
    except (TypeError, ValueError, OverflowError):
        prompt = np.empty((0, 0))
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestError("the prompt is not a list of token ids: expected integers")
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if len(outside):
        raise RequestError(f"the prompt has token id {outside[0]}: allowed are 0 to {vocab_size - 1}")
    return prompt.astype(np.int64)
