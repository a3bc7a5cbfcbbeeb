"""The engine process between its pipe and its generator: commands in, one message of outputs per step out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from plansmith_errors import RequestError
from plugins.generation import GenerationOutput, GenerationRequest, Generator, TokenLogprob
from triton_repo.backend.protocol import Cancel, Command, Delta, Event, Outputs, QueryStats, Refused, Stats, Submit
from triton_repo.backend.sampling_json import parse_sampling
from triton_repo.backend.tokenization import PromptTokenizer

logger = logging.getLogger(__name__)


class EngineService:
    """``sink`` runs on the step thread, ``run`` on the thread that reads commands; ``send`` must allow both."""

    def __init__(self, tokenizer: PromptTokenizer, send: Callable[[Event], None]) -> None:
        self._tokenizer = tokenizer
        self._send = send

    def sink(self, outputs: list[GenerationOutput]) -> None:
        """Pass one step's outputs on; those that add no text yet are counted in a later one."""
        deltas = [self._delta(o) for o in outputs if o.text or o.finish_reason is not None or o.logprobs]
        if deltas:
            self._send(Outputs(deltas))

    def run(self, commands: Iterable[Command], generator: Generator) -> None:
        """Serve until the commands end."""
        for command in commands:
            if isinstance(command, Submit):
                self._submit(command, generator)
            elif isinstance(command, Cancel):
                generator.cancel(str(command.request_id))
            elif isinstance(command, QueryStats):
                self._send(_stats(generator))

    def _submit(self, command: Submit, generator: Generator) -> None:
        try:
            sampling = parse_sampling(command.sampling_json, command.parameters_json)
            ids = command.input_ids if command.text is None else self._tokenizer.encode(command.text)
            generator.submit(GenerationRequest(str(command.request_id), ids or (), sampling))
        except RequestError as error:
            self._send(Refused(command.request_id, "INVALID_ARGUMENT", str(error)))
        except Exception as error:  # a bug of ours must cost this request, not the process and all others
            logger.exception("request %d could not be submitted", command.request_id)
            self._send(Refused(command.request_id, "INTERNAL", f"{type(error).__name__}: {error}"))

    def _delta(self, output: GenerationOutput) -> Delta:
        logprobs = None if output.logprobs is None else [self._logprob_json(entry) for entry in output.logprobs]
        return Delta(
            int(output.request_id),
            output.text,
            output.num_prompt_tokens,
            output.num_output_tokens,
            output.finish_reason,
            logprobs,
            output.error,
        )

    def _logprob_json(self, entry: TokenLogprob) -> str:
        chosen = self._token(entry.token_id, entry.logprob)
        chosen["top_logprobs"] = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return msgspec.json.encode(chosen).decode()

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        return {"token_id": token_id, "token": self._tokenizer.token_text(token_id), "logprob": logprob}


def _stats(generator: Generator) -> Stats:
    stats = generator.stats()
    return Stats(
        stats.num_running,
        stats.num_waiting,
        stats.num_blocks,
        stats.num_free_blocks,
        stats.num_steps,
        stats.num_prompt_tokens,
        stats.num_output_tokens,
        stats.num_preemptions,
    )
