"""From sampled tokens to what clients are sent, and the decision that a sequence has ended."""

from __future__ import annotations

import collections.abc

from plugins.generation import FinishReason, GenerationOutput, TokenLogprob
from plugins.inflight_batching.sequence import Sequence
from plugins.sampling.sampler import NO_TOKEN, SampledTokens

_NOT_FINITE = "the engine's logits for this token are not finite: nothing can be sampled from them"


class OutputBuilder:
    """Makes an output only where there is text to send: tokens whose text is held back are sent with the next text."""

    def __init__(self, eos_token_ids: collections.abc.Sequence[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)

    def add_tokens(
        self, sequences: list[Sequence], sampled: SampledTokens
    ) -> tuple[list[GenerationOutput], list[Sequence]]:
        """Outputs of one step, and the sequences that it ended; ``sampled`` has one token for each of ``sequences``."""
        outputs, ended = [], []
        logprobs = sampled.logprobs
        for row, (sequence, token_id) in enumerate(zip(sequences, sampled.token_ids.tolist(), strict=True)):
            output = self._add_token(sequence, token_id, logprobs.get(row) if logprobs else None)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                ended.append(sequence)
        return outputs, ended

    def last(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> GenerationOutput:
        """The last output of a sequence, with the text that was held back."""
        return _output(sequence, sequence.text.finish(), reason, error)

    def _add_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> GenerationOutput | None:
        if token_id == NO_TOKEN:
            return self.last(sequence, "error", _NOT_FINITE)
        sequence.output_ids.append(token_id)
        sequence.unsent_ids.append(token_id)
        if logprob is not None:
            sequence.unsent_logprobs.append(logprob)
        if token_id in self._eos_token_ids and not sequence.sampling.ignore_eos:
            return self.last(sequence, "stop")
        text = sequence.text.add(token_id)
        if sequence.text.stopped:
            return _output(sequence, text, "stop")
        if len(sequence.output_ids) >= sequence.max_tokens:
            text += sequence.text.finish()
            return _output(sequence, text, "stop" if sequence.text.stopped else "length")
        return _output(sequence, text) if text else None


def _output(
    sequence: Sequence, text: str, reason: FinishReason | None = None, error: str | None = None
) -> GenerationOutput:
    token_ids = tuple(sequence.unsent_ids)
    sequence.unsent_ids.clear()
    logprobs = None
    if sequence.sampling.logprobs is not None:
        logprobs = tuple(sequence.unsent_logprobs)
        sequence.unsent_logprobs.clear()
    return GenerationOutput(
        sequence.request_id,
        text,
        token_ids,
        sequence.num_prompt_tokens,
        len(sequence.output_ids),
        reason,
        logprobs,
        error,
    )
