"""Whole generations, for callers that want no stream: tests, benchmarks, quality measures."""

from __future__ import annotations

import collections.abc
import itertools
import threading

from tokenizers import Tokenizer

from plugins.generation import GenerationOutput, GenerationRequest, SamplingParams
from plugins.inflight_batching.generator import InflightGenerator
from plugins.inflight_batching.step import StepEngine


class OutputCollector:
    """A sink that joins the outputs of each request into one. ``wait`` may be called from any thread but the sink's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: dict[str, list[GenerationOutput]] = {}

    def __call__(self, outputs: list[GenerationOutput]) -> None:
        with self._changed:
            for output in outputs:
                self._parts.setdefault(output.request_id, []).append(output)
            self._changed.notify_all()

    def wait(self, request_ids: collections.abc.Iterable[str], timeout: float | None = None) -> list[GenerationOutput]:
        """Joined outputs in the order of ``request_ids``, once all have ended. Raises TimeoutError."""
        request_ids = list(request_ids)
        with self._changed:
            if not self._changed.wait_for(lambda: all(map(self._has_ended, request_ids)), timeout):
                late = sum(not self._has_ended(request_id) for request_id in request_ids)
                raise TimeoutError(f"{late} of {len(request_ids)} requests have not ended within {timeout} s")
            return [join_outputs(self._parts[request_id]) for request_id in request_ids]

    def _has_ended(self, request_id: str) -> bool:
        parts = self._parts.get(request_id)
        return parts is not None and parts[-1].finish_reason is not None


def join_outputs(parts: list[GenerationOutput]) -> GenerationOutput:
    """One output for all that a request was sent."""
    has_logprobs = parts[-1].logprobs is not None
    return parts[-1]._replace(
        text="".join(part.text for part in parts),
        token_ids=tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(itertools.chain.from_iterable(part.logprobs or () for part in parts)) if has_logprobs else None,
    )


def generate(
    engine: StepEngine,
    tokenizer: Tokenizer,
    eos_token_ids: collections.abc.Sequence[int],
    prompts: collections.abc.Sequence[collections.abc.Sequence[int]],
    sampling: SamplingParams,
) -> list[GenerationOutput]:
    """Continue all ``prompts`` (token ids) in one batch; outputs in their order. A failure shows as "error" outputs."""
    collector = OutputCollector()
    generator = InflightGenerator(engine, tokenizer, eos_token_ids, collector)
    try:
        request_ids = [str(number) for number in range(len(prompts))]
        for request_id, prompt_ids in zip(request_ids, prompts, strict=True):
            generator.submit(GenerationRequest(request_id, prompt_ids, sampling))
        return collector.wait(request_ids)
    finally:
        generator.close()
