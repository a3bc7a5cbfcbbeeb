"""The generation contract: what a client of an engine asks for and what it is given, whatever the engine is.

Engines with an executor of their own (TensorRT-LLM) attach here; all others are driven by ``inflight_batching``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. ``temperature == 0`` is greedy. Validated by ``from_mapping``."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the chosen token; None: no log probabilities

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Read a client's JSON object. Unknown names, wrong types and values out of range raise RequestError."""
        from plugins.sampling_params import parse_sampling_params

        return parse_sampling_params(values)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, as token ids [num_prompt_tokens], and how to continue it."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural logarithm, of the distribution before temperature
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class GenerationOutput(NamedTuple):
    """What one step added to one request. The last one of a request has ``finish_reason`` set.

    One is made for every sequence in every step: a named tuple costs a third of a frozen dataclass.
    """

    request_id: str
    text: str  # complete characters only; text that may still become a stop string is held back
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int  # so far
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token in token_ids
    error: str | None = None  # one line, with finish_reason "error"


OutputSink = Callable[[list[GenerationOutput]], None]
"""Called once per step, on the step thread, with that step's outputs. It must not block."""


@dataclass(frozen=True)
class GeneratorStats:
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int


class Generator(Protocol):
    """Submit and cancel may be called from any thread; outputs go to the sink that the generator was made with."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError at once when it can never run (empty, too long, out of range)."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; its last output says "cancelled". An unknown or ended id is ignored."""
        ...

    def stats(self) -> GeneratorStats: ...

    def close(self) -> None:
        """Stop the step thread; requests still open end with "cancelled"."""
        ...
